"""Other libraries' ways to call the operators: torch's custom ops, transformers' models. Each needs its extra."""
