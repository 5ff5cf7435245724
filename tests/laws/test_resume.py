"""Law 8: a run that is killed and started again ends with the same bits."""

from tests.laws.resume import main


def test_kills_change_no_bit(tmp_path):
    assert main(kills=3, seed=0, folder=tmp_path) == 3
