"""What a command line runs: the strict lexer against real bash, and what a deny is tried on."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from coder.permissions.permissions import Permissions
from coder.permissions.rules import rules_of
from coder.permissions.shell import joined, parse

BASH = ["/bin/bash", "--noprofile", "--norc", "-c"]
SYSTEM = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


def decided(command: str, rules: dict[str, str]) -> str:
    return (
        Permissions(rules_of({"bash": rules}))
        .decide(
            "bash",
            command,
            Path("/"),
        )
        .action
    )


def run(command: str, folder: Path) -> None:
    null = subprocess.DEVNULL
    subprocess.run(
        [*BASH, command],
        cwd=folder,
        env=SYSTEM,
        capture_output=True,
        stdin=null,
    )


# ---- plain and not plain -------------------------------------------------------------------------

PLAIN = {
    "ls -la sub": [["ls", "-la", "sub"]],
    "\n\n ls\t-l ;\n": [["ls", "-l"]],
    "a && b || c | d ; e\nf": [
        ["a"],
        ["b"],
        ["c"],
        ["d"],
        ["e"],
        ["f"],
    ],
    "a &&\n\n b |\nc;d": [["a"], ["b"], ["c"], ["d"]],
    "echo 'a $x `y` \\ ! \"'\"b;'c\"d '' x''y": [["echo", "a $x `y` \\ ! \"b;'cd", "", "xy"]],
    "git -c a=b log --format=%h x@": [["git", "-c", "a=b", "log", "--format=%h", "x@"]],
    "git diff HEAD~2..x^~ 'a b'": [["git", "diff", "HEAD~2..x^~", "a b"]],
    "echo 'if' if then \"é漢\" +x ^y 1:2,3": [
        ["echo", "if", "if", "then", "é漢", "+x", "^y", "1:2,3"]
    ],
    "make 2>&1 | tail -5": [["make"], ["tail", "-5"]],
    "a >/dev/null 2>&1 && b > /dev/null x 2> /dev/null;c </dev/null": [["a"], ["b", "x"], ["c"]],
    "a 2>/dev/null|b &>/dev/null": [["a"], ["b"]],
}
# By what is wrong with them; between two of them is a bar of its own
NOT_PLAIN = {
    "nothing to run": " ¦ \n ¦ ; ¦ a;;b ¦ && a ¦ a && ¦ a ||\n ¦ a | ; b ¦ a\n; b ¦ a && && b ¦ | a",
    "other operators": "a & b ¦ a & ¦ a |& b ¦ (a) ¦ { a; } ¦ a;&b ¦ ! a ¦ a\n)",
    "expansions": 'a $x ¦ $x ¦ a ${x} ¦ a $(b) ¦ a `b` ¦ a "$x" ¦ a "`b`" ¦ $\'a\' ¦ a $"b"'
    " ¦ a * ¦ a ? ¦ a [b] ¦ a {b,c} ¦ a ~ ¦ ~/a ¦ a ~b ¦ a x=~ ¦ a x:~ ¦ a ''~b ¦ a $((1))",
    "quoting": 'a\\b ¦ a \\\n b ¦ a \'b ¦ a "b ¦ a "\\b" ¦ a "b!" ¦ a \'b\' "c ¦ a \'b\nc\' ¦ a "b\tc"',
    "redirections": "a > b ¦ a >> b ¦ a 2> b ¦ a &> b ¦ a >| b ¦ a <> b ¦ a >& b ¦ a < b ¦ a << b"
    " ¦ a <<< b ¦ a <(b) ¦ a 2>&1b ¦ a 2>&1- ¦ a >/dev/nullx ¦ a>/dev/null ¦ >/dev/null a ¦ 2>&1"
    " ¦ a;>/dev/null ¦ a 3>&1 ¦ a >  /dev/null ¦ a 12>/dev/null ¦ a 1>&2 ¦ a >/dev/null& ¦ a '' >/dev/null'x'",
    "keywords": "if ¦ then a ¦ for x in y ¦ while a ¦ case x ¦ time a ¦ coproc a ¦ function a"
    " ¦ a; do ¦ 'if' a ¦ [[ a ¦ done",
    "programs that are none": "x=1 a ¦ x=1 ¦ 'x=1' a ¦ a+=b ¦ '' a ¦ \"a b\" c ¦ %1 ¦ ^a^b^ ¦ -x"
    " ¦ =a ¦ 'a;b' ¦ é",
    "comments and history": "a # b ¦ # a ¦ a !! ¦ !a ¦ ls #'\ntouch PWN #'",
    "characters": "a\rb ¦ a\r\nb ¦ a\0b ¦ a 'b\x01' ¦ a \x0b b ¦ a é ¦ a '\u00a0' ¦ a '\u2003' ¦ \ufeffa"
    " ¦ a '\u202e' ¦ a '\ufeff' ¦ a\u3000b ¦ a '\ud800' ¦ a '\x7f' ¦ a '\x9b'",
    "builtins that change what follows": "alias a=b ¦ hash -p b a ¦ shopt -s expand_aliases"
    " ¦ enable -n test ¦ set -k ¦ set -o posix ¦ set -o keyword ¦ set +k ¦ read PATH ¦ printf -v PATH ."
    " ¦ builtin alias a=b ¦ command alias a=b ¦ command -p command hash -p b a",
}


def test_a_plain_command_line_is_its_simple_commands() -> None:
    assert {command: parse(command) for command in PLAIN} == PLAIN


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_understood_is_not_plain(kind: str) -> None:
    commands = ["", " ", *NOT_PLAIN[kind].split(" ¦ ")]
    assert [command for command in commands if parse(command) is not None] == []


ATTACKS = r"""
command test -v 'a[`touch PWN`]'
printf -v 'a[$(touch PWN)]' x
declare a=1; unset 'a[$(touch PWN)]'
jobs -x touch PWN
mapfile -n 1 -C 'touch PWN' -c 1 <<< x
shopt -s expand_aliases; alias ls='touch PWN'~ls
set -o posix; alias ls='touch PWN'~ls
hash -p ./make ls; ls
"ls /../make"
printf -v PATH . ; make
unset PATH; ./make
builtin hash -p ./make ls; ls
"""


def test_no_part_of_a_line_passes_for_something_else(tmp_path: Path) -> None:
    """Each attack is real, and either the line is not plain or what runs is a command of its own in
    it."""
    for at, line in enumerate(ATTACKS.split("\n")[1:-1]):
        folder = tmp_path / str(at)
        command = line.replace("~", "\n")
        (folder / "ls ").mkdir(parents=True)
        (folder / "make").write_text("#!/bin/sh\n/bin/touch PWN\n")
        (folder / "make").chmod(0o755)
        run(command, folder)
        assert (folder / "PWN").exists(), f"bash does not do this: {command}"
        commands = parse(command)
        assert commands is None or "./make" in {argv[0] for argv in commands}, command


def test_the_text_of_an_argv_stands_for_no_other() -> None:
    """`git 'status /../x'` would run a program of the folder `git-status `, and is not what `git
    status *` means."""
    assert joined(["git", "status", "-s"]) == "git status -s"
    assert joined(["git", "status -s"]) == "git 'status -s'"
    assert joined(["ls", ""]) == "ls ''"
    assert joined(["a", "b'c"]) == "a 'b'\\''c'"


# ---- against real bash ---------------------------------------------------------------------------

# All strings in one bash: each in a subshell, where a program that is not found logs its argv, with
# the number of the string.
DRIVER = r"""
command_not_found_handle() { printf '%s\0' "$number" "$#" "$@" >&9; }
PATH=/nonexistent number=0
exec 9>>"$1" 8<"$2" 0</dev/null
while IFS= read -r -d '' line <&8; do
    ( eval "$line" ) 8<&- >/dev/null 2>&1
    number=$((number+1))
done
"""
NULLS = "a¦b¦ ¦ ¦2>&1¦>/dev/null¦2>/dev/null¦</dev/null¦&>/dev/null¦> /dev/null¦>¦2¦&¦\n¦;¦|¦&&¦'"
KEYWORDS = "a¦b¦ ¦ ¦if¦then¦fi¦for¦in¦do¦done¦time¦{¦}¦!¦[[¦case¦;¦\n¦&&¦|¦'time'¦a=b¦=¦''"
ALPHABETS = [
    *(NULLS.split("¦"), KEYWORDS.split("¦"), list("ab   \n''\"\"&&||;=-1")),
    list("abx  \t\n'\"\\$`;&|(){}<>=!#~*?[]-+.,:/@%^1 2"),
    list("a ''\"\"é\u00a0\u3000\ufeff\r\x01\x0b\x7f\x80;|\n"),
]
WORDS = "a¦b.c¦-x¦k=v¦%x¦'if'¦''¦' $x;`\\!'¦\" |'&\"¦'a'\"b\"c¦2>&1¦>/dev/null¦2> /dev/null¦&>/dev/null¦</dev/null"


def strings(seed: int, count: int) -> Iterator[str]:
    """Random strings over several alphabets, and a part of them made of words and separators with
    one character changed."""
    chance = random.Random(seed)
    for number in range(count):
        if number % 15:
            length = min(chance.randint(1, 14), chance.randint(1, 14))
            yield "".join(
                chance.choices(
                    ALPHABETS[number % len(ALPHABETS)],
                    k=length,
                )
            )
            continue
        line = ""
        for part in range(chance.randint(1, 4)):
            line += chance.choice([" ", ";", "\n", " | ", "&&", "||"]) * (part > 0)
            words = chance.choices(WORDS.split("¦"), k=chance.randrange(4))
            line += " ".join(
                [
                    chance.choice(["a", "b", "xx", "'a'"]),
                    *words,
                ]
            )
        if number % 2 == 0:
            at = chance.randrange(len(line))
            changed = chance.choice("'\"\\$`;&|()<>{}=!#~* \n\r")
            line = line[:at] + changed + line[at + chance.randrange(2) :]
        yield line


def ran(lines: list[str], folder: Path) -> dict[int, list[list[str]]]:
    """What each line runs in bash, by its number; nothing of it is there to be found."""
    log = folder / "log"
    source = folder / "lines"
    box = folder / "box"
    source.write_bytes(b"".join(line.encode() + b"\0" for line in lines))
    box.mkdir()
    argv = [*BASH, DRIVER, "bash", str(log), str(source)]
    env = {"LANG": "C.UTF-8"}
    subprocess.run(argv, cwd=box, env=env, check=True, timeout=300)
    assert not list(box.iterdir()), "a file was made"
    fields = log.read_bytes().decode().split("\0")
    found = dict[int, list[list[str]]]()
    at = 0
    while at < len(fields) - 1:
        end = at + 2 + int(fields[at + 1])
        found.setdefault(
            int(fields[at]),
            [],
        ).append(fields[at + 2 : end])
        at = end
    return found


@pytest.mark.case("PRM-32")
@pytest.mark.parametrize(
    "count",
    [500, pytest.param(40_000, marks=pytest.mark.slow)],
)
def test_bash_runs_what_the_split_has_and_nothing_else(tmp_path: Path, count: int) -> None:
    """No program is found, and yet each ends well: so all parts run if there is no `||`, and the
    split has to be exact."""
    accepted = {line: found for line in strings(20_26, count) if (found := parse(line)) is not None}
    found = ran(list(accepted), tmp_path)
    for number, (line, commands) in enumerate(accepted.items()):
        logged = sorted(found.get(number, []))
        if "||" in line or any("/" in argv[0] or argv[0] in (".", ":") for argv in commands):
            commands = [argv for argv in commands if argv in logged]  # not all of them run
            assert all(logged.count(argv) <= commands.count(argv) for argv in logged), line
        else:
            assert logged == sorted(commands), line
    assert len(accepted) > count / 20
    assert sum(map(len, found.values())) > count / 10, "there is something to be seen"


def test_no_builtin_surprises(tmp_path: Path) -> None:
    """Every builtin with arguments that some evaluate: a plain line runs none of them, but for eval
    and trap."""
    argv = [*BASH, "compgen -b"]
    names = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    value = "'a[$(touch PWN)]'"
    arguments = [value, f"-v {value}", f"-v {value} x", "'a[$(touch PWN)]=1'", f"-p {value}"]
    arguments += ["-i 'b=a[$(touch PWN)]'", "'$(touch PWN)'", f"-R {value}", f"1 -eq {value}"]
    arguments += [f"x {value}", f"-n {value}", "-C 'touch PWN' x"]
    calls = [f"{name} {each}" for name in names for each in arguments]
    unseen = [
        line
        for line in [*calls, *(f"command {call}" for call in calls)]
        if parse(line) is not None and not {"eval", "trap"} & set(line.split())
    ]
    run("".join(f"( {line} )\n" for line in unseen), tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(unseen) > 200


# ---- what a deny is tried on ---------------------------------------------------------------------

HIDDEN = r"""
t\ouch PWN ¦ to''uch PWN ¦ "touch" PWN ¦ $'touch' PWN ¦ /usr/bin/touch PWN ¦ /usr/bin/t''ouch PWN
tou\@ch PWN ¦ true; tou\@ch PWN ¦ touch${IFS}PWN ¦ {touch,PWN} ¦ X=1 touch PWN ¦ X='a b' Y=$z touch PWN
a[0]=1 touch PWN ¦ >f touch PWN ¦ 2>&1 touch PWN ¦ &>f touch PWN ¦ >|'f' touch PWN ¦ ! touch PWN
if true; then touch PWN; fi ¦ while touch PWN; do :; done ¦ for x in y; do touch PWN; done
case x in x) touch PWN;; esac ¦ { touch PWN; } ¦ (touch PWN) ¦ f() { touch PWN; }; f ¦ coproc touch PWN
$(touch PWN) ¦ `touch PWN` ¦ echo "$(touch PWN)" ¦ cat <(touch PWN) ¦ true & touch PWN ¦ true |& touch PWN
cat <<E@$(touch PWN)@E ¦ command touch PWN ¦ builtin eval touch PWN ¦ env touch PWN ¦ env X='a b' touch PWN
env -S 'touch PWN' ¦ env -S'touch PWN' ¦ env --split-string='touch PWN' ¦ echo PWN | xargs touch
timeout -s KILL -k 1 --foreground 5 touch PWN ¦ sudo -u root -E X=1 touch PWN ¦ sh -c 'touch PWN'
echo PWN | xargs -n 1 -I {} touch {} ¦ bash -ec 'true && touch PWN' ¦ bash -c 'X=1 touch PWN'
dash -c "sh -c 'touch PWN'" ¦ sh -c 'touch PWN' > f ¦ eval 'touch PWN' ¦ trap 'touch PWN' EXIT
find . -exec touch PWN ';' ¦ find . -exec touch PWN \; ¦ find . -name x -execdir touch {} +
find . -ok true ';' -exec sh -c 'touch PWN' ';' ¦ nohup env X=1 nice -n 5 timeout 1 sh -c 'sudo touch PWN'
bash +e -c 'touch X' ¦ su '-ctouch X' ¦ su '-mctouch X' ¦ script --command='touch X'
script -qc 'touch X' /dev/null ¦ sh -c "sh -c 'true; touch X'" y ¦ parallel touch ::: X
git -c core.pager='touch X' log ¦ git rebase --exec 'touch X' ¦ git grep -O'touch X' y
env -S'touch\_PWN' ¦ env -S"touch\_PWN" ¦ env -Stouch\\_PWN ¦ env -S"touch\\_PWN" ¦ env -vS'X=1\_touch\_PWN'
env --split-string='\_/usr/bin/touch\_PWN' ¦ env -S'"to"uch\_PWN' ¦ sudo env -S'nice\_touch' PWN
git -c alias.x='!touch PWN' x ¦ vim -c ':!touch PWN' ¦ python -c "run(['touch', 'PWN'])"
"""


def test_a_deny_sees_the_command_in_every_disguise_and_no_other_word() -> None:
    rules = {"*": "allow", "touch *": "deny"}
    hidden = [line.replace("@", "\n") for line in HIDDEN.strip().replace("\n", " ¦ ").split(" ¦ ")]
    hidden += ["nice " * 40 + "touch PWN", "true && " * 60 + "touch PWN"]
    assert len(hidden) > 60
    assert [command for command in hidden if decided(command, rules) != "deny"] == []
    assert decided(r"my\_tool x", {"*": "allow", "my_tool *": "deny"}) == "deny"
    # The quotes end a command, so a pattern fits that has no star at its end
    assert decided("sh -c 'touch X' y", {"*": "allow", "touch X": "deny"}) == "deny"
    # A pair of braces stands for itself
    removal = {"*": "allow", "find * -exec rm {} *": "deny"}
    assert decided("cd x; find . -exec rm {} +", removal) == "deny"
    others = ["ls -l 'a b' && /bin/cat x", "touchx y", "retouch x", "a-touch", "ls x.touch"]
    others += [r"rg 'retouch\_x'", r"sed s/a\\_touch/b/"]
    assert [command for command in others if decided(command, rules) == "deny"] == []


def test_a_deny_that_begins_with_a_star_is_tried_on_whole_commands() -> None:
    rules = {"*": "deny", "ls *": "allow", "* --force": "deny"}
    lines = ["ls -l x", "ls 'a; b'", "ls; id", "sh -c 'ls'", "ls --force", "ls $x"]
    expected = ["allow", "allow", "deny", "deny", "deny", "ask"]
    assert [decided(line, rules) for line in lines] == expected
