"""The type checker that tests put around every function of zoo: beartype, where an int serves as a float."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
