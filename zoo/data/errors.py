"""What goes wrong with data."""


class DataError(ValueError):
    """Text, a tokenizer or a token cache that cannot be used; the message names it and says what to do."""
