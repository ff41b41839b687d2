"""Where the values of options come from: YAML files, recipes that inherit, and datasets in memory."""
