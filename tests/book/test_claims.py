"""The ledger of claims: known verdicts, chapters of the book, enough seeds."""

import sys
from pathlib import Path

import pytest

BOOK = Path(__file__).parents[2] / "book"
sys.path.insert(0, str(BOOK))
import claims  # noqa: E402


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.says[:40])
def test_an_entry_has_a_known_verdict_a_source_and_a_finding_in_a_chapter(claim):
    assert set(claim.texts.split(", ")) <= set(claims.TEXTS)
    assert claim.verdict in claims.VERDICTS and claim.source
    tested = claim.verdict != "not testable here"
    assert tested == bool(claim.chapter) == bool(claim.finding)
    if tested:
        toc = (BOOK.parent / "_toc.yml").read_text(encoding="utf-8")
        assert f"file: notebooks/{claim.chapter}\n" in toc
        assert "nan" not in claim.found()


def test_every_number_is_of_at_least_five_seeds(monkeypatch):
    seen = []

    def counted(name):
        seen.append(name)
        results = claims_load(name)
        assert min(len(runs) for runs in results.runs.values()) >= 5, name
        return results

    claims_load = claims.load
    monkeypatch.setattr(claims, "load", counted)
    page = claims.claims_markdown()
    assert len(set(seen)) > 10
    assert all(claim.says[1:] in page for claim in claims.CLAIMS)


def test_arms_of_two_experiments_are_paired_by_seed():
    left = ("opsm", "0.0001_16", claims.ACC, 30, 40)
    assert claims.across(left, left).mean == 0
    assert claims.across(left, left).low == 0
    with pytest.raises(ValueError, match="longer"):
        claims.across(left, ("silent_collapse", "healthy", "reward", 1, 9))
