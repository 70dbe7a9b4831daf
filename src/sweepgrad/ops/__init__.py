"""The operations: rows and rules, each declared once, and how they run on tensors."""
