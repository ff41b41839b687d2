"""Recipes that come with jaxtune: train by one with --config=NAME, or --config=NAME:ARGUMENT.

Your own recipe, in any folder, can start from one of them by import:

    from jaxtune.recipes import qwen_lora

    def get_config(model="my/model"):
        config = qwen_lora.get_config(model)
        config.lora.rank = 64
        return config

A recipe imports nothing but the standard library, jaxtune.config and other recipes: `jaxtune recipes` reads them all.
"""
