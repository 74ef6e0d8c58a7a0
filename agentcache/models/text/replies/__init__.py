"""What a model has said, told apart: what it thought, what it says, and the tools it calls."""
