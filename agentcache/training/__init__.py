"""How the embedded model was made (documents, tokenizer, training, recall), and LoRA decoders on a model's cache."""
