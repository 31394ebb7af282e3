"""`hf-drelay convert` on a drafter of our own format."""

from typer.testing import CliRunner

from hf_drelay import DRelayModel
from hf_drelay.cli import app
from hf_drelay.modeling.configuration_drelay import DRelayConfig


def test_convert_writes_a_public_checkpoint_and_says_what_it_is(tmp_path):
    config = DRelayConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_target_layers=8,
        block_size=4,
        head="bilinear",
        head_rank=4,
    )
    DRelayModel(config).save_pretrained(tmp_path / "own")
    arguments = ["convert", str(tmp_path / "own"), str(tmp_path / "public"), "--format", "zlab"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "layout: fill_in" in result.output
    assert DRelayModel.from_pretrained(tmp_path / "public").config.head == "bilinear"
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "not empty" in again.output
