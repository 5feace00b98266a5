package reference

import (
	"github.com/capsem/capsem/internal/config"
)

func configPage() string {
	p := newPage("Configuration", "Files in `$CAPSEM_HOME` (default `~/.capsem`), in TOML. A key that is not listed here is an error that names it; so is a key that later versions will have.")
	p.heading(2, "config.toml: this machine")
	p.keys(config.SettingsKeys())
	p.heading(2, "profiles/NAME.toml: what a VM is made from and governed by")
	p.text("`capsem create --profile NAME` uses it; without `--profile`, `default` is used, which need not exist.")
	p.keys(config.ProfileKeys())
	p.heading(2, "corp.toml: the organisation's rules")
	p.text("`corp.toml` in the home, and `/etc/capsem/corp.toml`. They hold for every VM of the machine, before the rules of its profile.")
	p.keys(config.RuleKeys())
	p.heading(2, "Variables")
	p.rows([]string{"variable", "what"}, [][]string{
		{code(config.EnvHome), "the home folder, an absolute path"},
		{code(config.EnvAccelerator), "overrides `accelerator` of config.toml"},
		{code(config.EnvTestRequire), "for tests: what the machine must offer (`vm,jail`); a test that would skip for the lack of it fails"},
	})
	return p.String()
}

// keys writes a table for each table of a file.
func (p *page) keys(keys []config.Key) {
	for len(keys) > 0 {
		table := keys[0].Table
		if table != "" {
			p.heading(3, code(table))
		}
		var rows [][]string
		for len(keys) > 0 && keys[0].Table == table {
			k := keys[0]
			rows = append(rows, []string{code(k.Name), k.Type, code(k.Default), code(k.Example), k.Doc})
			keys = keys[1:]
		}
		p.rows([]string{"key", "type", "default", "example", "what"}, rows)
	}
}
