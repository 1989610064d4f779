"""Reading and writing Hugging Face checkpoints, with one file for each family of models."""
