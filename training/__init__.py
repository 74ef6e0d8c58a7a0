"""How the embedded model was made: documents, tokenizer, training, recall (`python -m training --help`)."""
