"""Recipes that come with jaxtune. Train with one by --config=NAME, or --config=NAME:ARGUMENT.

Your own recipe, in any folder, can import one and change it:

    from jaxtune.recipes import qwen_lora

    def get_config(model="my/model"):
        config = qwen_lora.get_config(model)
        config.lora.rank = 64
        return config

A recipe imports only the standard library, jaxtune.config and other recipes: `jaxtune recipes` reads them all.
"""
