"""The 310P kernel, operation for operation."""
