#!/usr/bin/env bash
# Prints bash's completion of a program from its --help: the options, and the values of options with a choice.
# completion.sh PROGRAM NAME...: NAMEs are the commands to complete.
set -euo pipefail
help=$("$1" --help)
shift
awk -v names="$*" '
    function add(text,    word, i) { # "  --gns NAME   off|ln|exact: ..."
        split(text, word, " ")
        if (word[1] !~ /^--/) return
        options = options " " word[1]
        for (i = 2; i in word && i < 4; i++)
            if (word[i] ~ /^[a-z0-9-]+([|][A-Za-z0-9:-]+)+:$/) {
                gsub(/[|]/, " ", word[i])
                sub(/:$/, "", word[i])
                choices = choices "    " word[1] ") words=\"" word[i] "\" ;;\n"
            }
    }
    /^  --/ { add(text); text = "" }
    { text = text $0 }
    END {
        add(text)
        print "_gns_" names_first() "() {\n    local words=\"" substr(options, 2) "\" word=${COMP_WORDS[COMP_CWORD]}"
        print "    case ${COMP_WORDS[COMP_CWORD - 1]} in"
        print choices "    --help) words=${words//--/} ;;\n    *) [[ $word == -* ]] || return 0 ;;\n    esac"
        print "    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}"
        print "complete -o default -F _gns_" names_first() " " names
    }
    function names_first() { return substr(names, 1, index(names " ", " ") - 1) }
' <<< "$help"
