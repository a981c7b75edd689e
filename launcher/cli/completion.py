"""Shell completion for verbs and options: ``source <(longctx --completion)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SCRIPT = """\
# Completes longctx in bash and zsh. For new shells: longctx --completion > FILE, and `source FILE` in their start file.
if [ -n "${{ZSH_VERSION-}}" ]; then
    autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit
fi
_longctx() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" offered=""
    case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
# If there is no match, file names are completed.
complete -o bashdefault -o default -F _longctx longctx"""


def completion_script(flags: Mapping[str, Sequence[str]]) -> str:
    """Build a bash and zsh script that completes verbs and, per verb, its options."""
    groups: dict[str, list[str]] = {}
    for name in flags:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    cases = [('"1 "*', list(groups))]
    cases += [(f'"2 {first} "*', seconds) for first, seconds in groups.items() if seconds]
    for name, offered in flags.items():
        # A one-word verb matches with any word after it; a two-word verb must match both words.
        cases.append((f'*" {name}"' if " " in name else f'*" {name} "*', list(offered)))
    return _SCRIPT.format(
        cases="\n".join(f'        {pattern}) offered="{" ".join(words)}" ;;' for pattern, words in cases)
    )
