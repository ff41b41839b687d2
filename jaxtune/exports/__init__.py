"""Hugging Face folders and PEFT adapters written from the parameters of a run, with their model card."""
