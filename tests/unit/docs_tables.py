"""Tables of the pages that are made from the code, between `<!-- name -->` and `<!-- end -->`."""

import os
import re
from pathlib import Path


def check_table(page: Path, name: str, table: str) -> None:
    """Compare the table of that name with `table`; with UPDATE_DOCS=1 write it instead."""
    pattern = rf"(<!-- {name} -->\n)(.*?)(<!-- end -->)"
    text = page.read_text()
    (found,) = re.findall(pattern, text, re.DOTALL)
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(re.sub(pattern, lambda match: f"{match[1]}{table}\n{match[3]}", text, flags=re.DOTALL))
        return
    assert found[1] == f"{table}\n", "UPDATE_DOCS=1 writes it"
