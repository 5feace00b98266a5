#!/usr/bin/env bash
# What Capsem does, shown on a virtual machine: `just demo` runs this. It prints
# each command before it runs it, and leaves nothing behind; its home folder is a
# temporary one, with the image that was built for the usual one. An argument is
# the folder of the programs, bin/ if there is none.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
PATH=${1:-$here/../../bin}:$PATH
built=${CAPSEM_HOME:-$HOME/.capsem}/images
began=$SECONDS

work=$(mktemp -d "${TMPDIR:-/tmp}/capsem-demo.XXXXXX")
export CAPSEM_HOME=$work/home
clean_up() {
    capsem purge --all --yes >/dev/null 2>&1 || true # the demo may have failed before there was a VM
    capsem service stop >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT
mkdir -p -m 0700 "$CAPSEM_HOME/profiles"
cp -rl "$built" "$CAPSEM_HOME/images" 2>/dev/null || { rm -rf "$CAPSEM_HOME/images"; cp -r "$built" "$CAPSEM_HOME/images"; }
cd "$work"

bold='' dim='' plain=''
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
run() {
    printf '%s$ %s%s\n' "$dim" "$1" "$plain"
    bash -c "set -o pipefail; $1"
}

cat >"$CAPSEM_HOME/profiles/demo.toml" <<TOML
[[mcp.servers]]
name    = "everything"
command = "node"
args    = ["$(cd "$here/../npm" && pwd)/node_modules/@modelcontextprotocol/server-everything/dist/index.js", "stdio"]

[rules.nothing_destructive]
match  = 'mcp.request.arguments.message.contains("rm -rf")'
action = "block"
reason = "Agents do not delete everything."
TOML

# The agent: it hands requests, one JSON line each, to the guest's MCP server.
cat >agent <<'SH'
#!/bin/sh
client='{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"agent","version":"1"}}'
case $1 in
list) request='"method":"tools/list"' ;;
call) request='"method":"tools/call","params":{"name":"'$2'","arguments":'$3'}' ;;
esac
printf '%s\n' '{"jsonrpc":"2.0","id":1,"method":"initialize","params":'"$client"'}' \
    '{"jsonrpc":"2.0","id":2,'"$request"'}' | /run/capsem-mcp-server | grep '"id":2'
SH

say "A profile says what an agent gets, an MCP server that runs on this host, and what it must not do:"
run "cat $CAPSEM_HOME/profiles/demo.toml"

say "A virtual machine with that profile. It has no network; its one way out is Capsem."
run 'capsem create --name box --profile demo'
run "capsem exec box -- uname -sr"
run "capsem exec -i box -- sh -c 'cat >/bin/agent; chmod +x /bin/agent' <agent"

say "The agent in it lists its tools: those of Capsem's own server, and those of the other."
run "capsem exec box -- agent list | grep -o '\"name\":\"[a-z]*__[^\"]*\"' | cut -d'\"' -f4 | paste -sd' ' - | fold -sw 100"

say "It calls a tool of each."
run "capsem exec box -- agent call builtin__echo '{\"text\":\"hello\"}'"
run "capsem exec box -- agent call everything__echo '{\"message\":\"hello\"}'"

say "It tries what the rule forbids. The server never sees the call; the agent is told why."
run "capsem exec box -- agent call everything__echo '{\"message\":\"rm -rf /\"}'"

say "All of it stands in the ledger: what was asked, by whom, what was decided and by which rule."
run 'capsem sql box "SELECT substr(timestamp, 12, 8) AS time, initiator_kind, server_name, tool, arguments, status, decision, rule_id FROM tool_calls ORDER BY id"'
run 'capsem sql box "SELECT substr(timestamp, 12, 8) AS time, process_name, method, status FROM protocol_events WHERE method = '\''tools/list'\''"'
run 'capsem sql box "SELECT rule_id, action, phase, reason FROM security_rule_events"'

say "The machine goes; its ledger stays, sealed."
run 'capsem delete --force box'
run 'capsem timeline --limit 6 box'

say "That took $((SECONDS - began)) s. Next: capsem --help, and docs/."
