"""Sources of the values of options: YAML files, recipes that inherit, and datasets in memory."""
