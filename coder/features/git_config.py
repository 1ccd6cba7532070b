"""git's configuration, read strictly, and which of its keys name a program or a place that git trusts.

A new line counts unless it is known to be harmless: `core.pager` and `alias.x = !program` count, a branch's upstream does not.
What it leaves out: the files that it is read from (git_places.py), and what git makes of a line that is not plain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

# Sections of which no key names a program, and keys of others, with * for a subsection. From git's Documentation/config/.
SECTIONS = {"user", "author", "committer", "color", "advice", "status", "rerere", "fetch", "push", "index", "feature", "extensions",
            "stash", "blame", "column", "tag", "log", "format", "i18n", "rebase", "am", "maintenance", "receive", "versionsort", "grep"}
KEYS = {
    *(f"core.{name}" for name in ("repositoryformatversion", "filemode", "bare", "logallrefupdates", "symlinks", "ignorecase",
                                  "precomposeunicode", "autocrlf", "eol", "safecrlf", "quotepath", "sparsecheckout", "sparsecheckoutcone",
                                  "untrackedcache", "longpaths", "abbrev", "compression", "whitespace", "commitgraph", "worktree",
                                  "fscache", "sharedrepository")),
    *(f"remote.*.{name}" for name in ("url", "pushurl", "fetch", "push", "tagopt", "prune", "prunetags", "mirror", "promisor",
                                      "partialclonefilter", "followremotehead", "gh-resolved")),
    *(f"branch.*.{name}" for name in ("remote", "merge", "rebase", "pushremote", "description", "vscode-merge-base", "gh-merge-base")),
    *(f"submodule.*.{name}" for name in ("url", "active", "update", "branch", "ignore")), "submodule.active", "submodule.recurse",
    *(f"maintenance.*.{name}" for name in ("enabled", "schedule", "auto")),
    "init.defaultbranch", "pull.rebase", "pull.ff", "merge.conflictstyle", "merge.ff", "credential.usehttppath",
    "diff.algorithm", "diff.renames", "diff.noprefix", "diff.mnemonicprefix", "diff.colormoved", "commit.gpgsign", "gc.auto",
    "branch.autosetuprebase", "branch.autosetupmerge", "branch.sort", "lfs.repositoryformatversion", "http.postbuffer"}
RUNS = re.compile(r"\s*(!|[\w+.-]+::)")  # a value that git runs: submodule.update, and ext:: where a URL stands
PLAIN = re.compile(r"true|false|yes|no|on|off|\d+", re.I)  # as a program's name it is one of the system
PATHS = {"core.hookspath", "core.attributesfile", "include.path", "includeif.*.path", "init.templatedir"}  # and as a folder's it is not
TRUST = {"http.sslverify", "http.*.sslverify"}
TOOLS = {"merge.tool", "merge.guitool", "diff.tool", "diff.guitool"}  # files of git's own folder; a slash would lead out of it
ALIAS = re.compile(r"(add|blame|branch|checkout|cherry-pick|commit|describe|diff|fetch|log|merge|pull|push|reflog|remote|reset|restore"
                   r"|rev-parse|shortlog|show|stash|status|switch|tag)\b")
NOT_IN_ALIAS = re.compile(r"!|::|--(exec|upl|rec|ext|textc|conf|rep|out)|(^|\s)-[a-z]*[cxso]", re.I)  # options that run or write
WORKTREE = "core.worktree"  # harmless where it leads from a submodule's folder back into the repository

SECTION = re.compile(r'\s*\[([A-Za-z0-9-]+)(?:[ \t]+"((?:[^"\\]|\\.)*)")?\]\s*')
ENTRY = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)[ \t]*(?:=[ \t]*((?:[^\\]|\\[\\\"tnb])*))?")
NOTHING = re.compile(r"\s*([#;].*)?")
NOT_PLAIN = "a line that is not plain"


def new_keys(old: bytes, new: bytes, leads_home: Callable[[str], bool]) -> list[str]:
    """Keys that count among the lines that are new. `leads_home` says whether a core.worktree leads back into the repository."""
    lines = Counter(entries(new)) - Counter(entries(old))
    return list(dict.fromkeys(key for key, value in lines if not _harmless(key, plain(value), leads_home)))


def _harmless(key: str, value: str, leads_home: Callable[[str], bool]) -> bool:
    section, _, name = key.partition(".")
    known = f"{section}.*.{name.rpartition('.')[2]}" if "." in name else key
    if key == WORKTREE:
        return leads_home(value)
    if PLAIN.fullmatch(value) and known not in PATHS | TRUST:
        return True
    if section == "alias":
        return bool(ALIAS.match(value)) and not NOT_IN_ALIAS.search(value)
    if known in TOOLS:
        return "/" not in value
    return (known in KEYS or (section in SECTIONS and "." not in name)) and not RUNS.match(value)


def entries(data: bytes) -> list[tuple[str, str]]:
    """(key, value) of each line, the key as `section.subsection.name`, section and name in small letters. Whatever is not a
    section, a comment or `name = value` in one plain line comes as (NOT_PLAIN, the line): git may read something else in it."""
    found, section, continued = list[tuple[str, str]](), "", False
    for line in data.replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape").split("\n"):
        head, entry = SECTION.fullmatch(line), ENTRY.fullmatch(line)
        plain = not continued and not re.search("[\x00-\x08\x0b-\x1f\x7f]", line)
        continued = line.endswith("\\")
        if plain and head:
            section = f"{head[1].lower()}.{head[2]}" if head[2] is not None else head[1].lower()
        elif plain and section and entry:
            found.append((f"{section}.{entry[1].lower()}", (entry[2] or "").strip()))
        elif not (plain and NOTHING.fullmatch(line)):
            found.append((NOT_PLAIN, line))
    return found


def plain(value: str) -> str:
    """A value as git understands it: without quotes and the comment behind it."""
    bare = re.sub(r'"((?:[^"\\]|\\.)*)"?|\s*[#;].*', lambda match: match[1] or "", value)
    return re.sub(r'\\(["\\])', r"\1", bare)
