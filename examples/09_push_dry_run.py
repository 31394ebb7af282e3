"""Write the repository of a drafter to disk and check it; nothing is uploaded.

    python examples/09_push_dry_run.py

Needs: the demo target, fetched on first use; a CPU is enough.
Prints the checked files. The same in a shell: hf-drelay push FOLDER --dry-run --output DIR.
To upload: hf-drelay push FOLDER me/my-drafter, or drelay.push_to_hub("me/my-drafter").
"""

import tempfile
from pathlib import Path

from hf_drelay.hub.push import prepare
from hf_drelay.targets import resolve_drafter


with tempfile.TemporaryDirectory() as scratch:
    repository, report = prepare(resolve_drafter(), Path(scratch) / "repository", "me/my-drafter")
    print(report)
    for path in sorted(repository.rglob("*")):
        print(path.relative_to(repository))
