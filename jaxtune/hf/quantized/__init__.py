"""Quantized weights in Hugging Face folders: read as they are (`prequantized`) and written (`written`)."""
