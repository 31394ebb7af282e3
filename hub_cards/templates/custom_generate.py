"""`target.generate(..., custom_generate="owner/repo", trust_remote_code=True, assistant_model=drelay)`.

The official route of transformers to a decoding method of one's own. It needs no wrapper of any class: with
`HF_DRELAY_NO_HOOK=1` in the environment nothing of transformers is changed. The prepared call reaches the host's own
assisted loop through a stand-in for the target that differs from it in one method, the one that makes the candidate
generator.
"""

from transformers import GenerationMixin


def generate(model, assistant_model=None, streamer=None, synced_gpus=None, **arguments):
    """
    Generate with a DRelay drafter.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`DRelayModel` or `DraftView`): The drafter, or a view of it with options.
        streamer, synced_gpus, arguments: As in `model.generate`.

    Raises:
        ValueError: If `assistant_model` is no drafter of this kind, or an argument does not go with it.
    """
    if not all(hasattr(assistant_model, name) for name in ("check_generation", "for_call")):
        raise ValueError(
            f"`assistant_model` is {type(assistant_model).__name__}; this `custom_generate` needs a DRelay drafter: "
            "`AutoModel.from_pretrained(repo, trust_remote_code=True)`."
        )

    def decode(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        assistant_model.check_generation(
            target=target, generation_config=generation_config, arguments={"assistant_model": assistant_model}
        )
        call = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            **model_kwargs,
        }
        call |= assistant_model.for_call(target=target, input_ids=input_ids, call=call)
        loop = GenerationMixin._assisted_decoding
        return loop(
            _StandIn(target),
            input_ids,
            streamer=streamer,
            synced_gpus=bool(synced_gpus),
            **call,
        )

    # `generate` prepares the call and hands the callable neither assistant nor streamer; it has them from here.
    return model.generate(custom_generate=decode, streamer=streamer, synced_gpus=synced_gpus, **arguments)


class _StandIn:
    """The target as the host's loop sees it."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return getattr(self._target, name)

    def __call__(self, *args, **kwargs):
        return self._target(*args, **kwargs)

    def _get_candidate_generator(self, assistant_model=None, **call):
        return assistant_model.build_candidate_generator(target=self._target, **call)
