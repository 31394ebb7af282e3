"""Text of single tokens: what each one adds to the text before it."""

_CONTEXT = 6  # tokens before; enough for spaces that depend on the neighbor


def token_pieces(tokenizer, token_ids: list[int]) -> list[str]:
    """
    Text that each token adds. A token inside a character of several bytes adds nothing, its last one the character;
    special tokens add nothing.
    """
    pieces, start, shown = [], 0, ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[start:end], skip_special_tokens=True)
        if text.endswith("\ufffd"):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        start = max(start, end - _CONTEXT)
        shown = tokenizer.decode(token_ids[start:end], skip_special_tokens=True)
        if shown.endswith("\ufffd") or shown.startswith("\ufffd"):  # the window cuts a character: keep all of it
            start = max(0, end - 4 * _CONTEXT)
            shown = tokenizer.decode(token_ids[start:end], skip_special_tokens=True)
    return pieces


def visible(text: str) -> str:
    """A token's text with white space made visible."""
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "∅"
