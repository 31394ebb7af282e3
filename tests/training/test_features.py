"""Features of the target: computed once, kept in memory or on disk, and the same wherever they come from."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drelay.evaluation import records
from hf_drelay.modeling.target_adapter import HeadRows, TargetAdapter
from hf_drelay.training.features import FeatureFolder, FeatureStore, feature_bytes


V, H, TAPS = 32, 16, [0, 1]
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


class TestFeatureStore:
    @staticmethod
    def _store(target, max_bytes):
        """A store, and the list of batch sizes of the target's forwards."""
        store, calls = FeatureStore(TargetAdapter(target, HeadRows()), TAPS, max_bytes=max_bytes), []
        target.model.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        return store, calls

    @pytest.fixture(autouse=True)
    def _remove_hooks(self, target):
        yield
        target.model._forward_pre_hooks.clear()
        target.model._forward_pre_hooks_with_kwargs.clear()

    @pytest.mark.parametrize("max_bytes", [0, 1 << 20], ids=["no_memory", "memory"])
    def test_states_are_those_of_each_sequence_alone(self, target, max_bytes):
        store, _ = self._store(target, max_bytes)
        for _ in range(2):  # computed, and kept or computed again
            states, _ = store.get(["a", "b"], IDS, [5, 3])
            for row, length in ((0, 5), (1, 3)):
                with torch.no_grad():
                    hidden = target(IDS[row : row + 1, :length], output_hidden_states=True).hidden_states
                expected = torch.cat([hidden[1], hidden[2]], dim=-1)[0]
                torch.testing.assert_close(states[row, :length], expected, rtol=1e-4, atol=1e-5)
            assert not states[1, 3:].any()

    def test_target_is_asked_once_when_the_states_fit(self, target):
        store, calls = self._store(target, 1 << 20)
        first = store.get(["a", "b"], IDS, [5, 3])[0]
        assert torch.equal(store.get(["a", "b"], IDS, [5, 3])[0], first)
        assert calls == [2]

    def test_kept_states_serve_other_batches(self, target):
        store, calls = self._store(target, 1 << 20)
        first = store.get(["a", "b"], IDS, [5, 3])[0]
        alone = store.get(["b"], IDS[1:, :3], [3])[0]
        assert torch.equal(alone, first[1:, :3]) and calls == [2]

    def test_target_is_asked_again_without_memory(self, target):
        store, calls = self._store(target, 0)
        store.get(["a", "b"], IDS, [5, 3])[0]
        store.get(["a", "b"], IDS, [5, 3])[0]
        assert calls == [2, 2]

    def test_states_that_do_not_fit_are_not_kept(self, target):
        size = 3 * 2 * H * 4  # of the shorter sequence in bytes
        store, calls = self._store(target, size)
        store.get(["a", "b"], IDS, [5, 3])[0]
        assert store.free_bytes == 0
        store.get(["b"], IDS[1:, :3], [3])[0]
        store.get(["a"], IDS[:1], [5])[0]
        assert calls == [2, 1]

    def test_memory_is_not_charged_twice(self, target):
        store, _ = self._store(target, 1 << 20)
        store.get(["b"], IDS[1:, :3], [3])[0]
        left = store.free_bytes
        store.get(["a", "b"], IDS, [5, 3])[0]  # the second is known, the first is not
        assert left - store.free_bytes == 5 * 2 * H * 4

    def test_states_carry_no_gradient(self, target):
        store, _ = self._store(target, 0)
        assert not store.get(["a", "b"], IDS, [5, 3])[0].requires_grad


class TestSoftTargets:
    def test_they_are_the_targets_own_best_tokens(self, target):
        store = FeatureStore(TargetAdapter(target, HeadRows()), TAPS, num_soft_targets=5)
        _, soft = store.get(["a", "b"], IDS, [5, 3])
        for row, length in ((0, 5), (1, 3)):
            with torch.no_grad():
                top = target(IDS[row : row + 1, :length]).logits[0].log_softmax(-1).topk(5, dim=-1)
            assert torch.equal(soft.ids[row, :length], top.indices)
            torch.testing.assert_close(soft.log_probs[row, :length].float(), top.values, rtol=0, atol=5e-3)


ABOUT = {"target": "tiny", "target_layer_ids": TAPS}


def make_store(target, folder, **options) -> FeatureStore:
    adapter = TargetAdapter(target, HeadRows())
    return FeatureStore(adapter, TAPS, num_soft_targets=2, folder=FeatureFolder(folder, ABOUT, **options))


class TestFeatureFolder:
    @pytest.mark.parametrize("shard_bytes", [1, 1 << 20], ids=["a shard each", "one shard"])
    def test_another_run_finds_what_one_has_written(self, target, tmp_path, shard_bytes, monkeypatch):
        first = make_store(target, tmp_path, shard_bytes=shard_bytes)
        expected = first.get(["a", "b"], IDS, [5, 3])
        first.folder.flush()
        second = make_store(target, tmp_path)
        assert len(second.folder) == 2
        monkeypatch.setattr(second, "_compute", None)  # it must not be needed
        states, soft = second.get(["a", "b"], IDS, [5, 3])
        assert torch.equal(states, expected[0])
        assert torch.equal(soft.ids, expected[1].ids) and torch.equal(soft.log_probs, expected[1].log_probs)

    def test_what_is_not_written_yet_is_found_too(self, target, tmp_path, monkeypatch):
        store = make_store(target, tmp_path)
        expected, _ = store.get(["a"], IDS[:1], [5])
        monkeypatch.setattr(store, "_compute", None)
        assert torch.equal(store.get(["a"], IDS[:1], [5])[0], expected)

    def test_corrupt_shard_is_put_aside_and_made_again(self, target, tmp_path, caplog):
        store = make_store(target, tmp_path)
        expected, _ = store.get(["a"], IDS[:1], [5])
        store.folder.flush()
        (shard,) = tmp_path.glob("features-*.safetensors")
        shard.write_bytes(shard.read_bytes()[:100])
        again = make_store(target, tmp_path)
        assert "cannot be read" in caplog.text
        assert len(again.folder) == 0 and list(tmp_path.glob("*.corrupt"))
        assert torch.equal(again.get(["a"], IDS[:1], [5])[0], expected)
        again.folder.flush()
        assert len(make_store(target, tmp_path).folder) == 1

    def test_full_disk_ends_the_writing_and_not_the_run(self, target, tmp_path, monkeypatch, caplog):
        store = make_store(target, tmp_path)
        store.get(["a"], IDS[:1], [5])
        store.folder.flush()
        expected, _ = store.get(["b"], IDS[1:, :3], [3])

        def full(*arguments):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(records.os, "replace", full)
            store.folder.flush()
        assert "No space left" in caplog.text
        assert not list(tmp_path.glob("*.part"))
        assert torch.equal(store.get(["b"], IDS[1:, :3], [3])[0], expected)
        store.folder.flush()
        assert len(make_store(target, tmp_path).folder) == 1

    def test_shard_that_vanished_is_computed_again(self, target, tmp_path):
        store = make_store(target, tmp_path)
        expected, _ = store.get(["a"], IDS[:1], [5])
        store.folder.flush()
        next(tmp_path.glob("features-*")).unlink()
        assert torch.equal(store.get(["a"], IDS[:1], [5])[0], expected)

    def test_features_of_another_target_are_refused(self, tmp_path):
        FeatureFolder(tmp_path, ABOUT)
        with pytest.raises(ValueError, match="made with target 'tiny', but this run has 'other'"):
            FeatureFolder(tmp_path, ABOUT | {"target": "other"})

    def test_estimate_equals_what_is_written(self, target, tmp_path):
        store = make_store(target, tmp_path)
        store.get(["a", "b"], IDS, [5, 3])
        stored = sum(t.nbytes for row in store.folder._pending.values() for t in row.values())
        assert feature_bytes(8, len(TAPS) * H, 2, 4) == stored
