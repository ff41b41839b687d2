"""A mixture of experts: the router, tokens sorted by expert, the products, and the exchange between devices."""
