"""What the public functions raise."""


class ContractError(ValueError):
    """An argument breaks the contract; the message names it, the rule with its numbers, and what came."""


class DtypeError(ContractError, TypeError):
    """An argument has a type or dtype that the contract does not take."""


class BudgetError(ContractError):
    """A plan needs more unified buffer than the device has; the message shows the ledger."""


class UnsupportedError(NotImplementedError):
    """What was asked for has a meaning, and this version does not offer it."""
