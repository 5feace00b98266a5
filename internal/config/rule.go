package config

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// Actions that this version enforces.
const (
	ActionAllow = "allow"
	ActionBlock = "block"
)

// maxExpression bounds a rule's expression, in bytes.
const maxExpression = 16 << 10

// Expression is CEL text and where its first byte stands, so that a compiler can
// point into the file. The text was not compiled.
type Expression struct {
	Text     string
	Position Position
}

// Rule is one rule as it is written. Its id is unique in its file.
type Rule struct {
	ID     string
	Match  Expression
	Unless Expression // Text is "" where the rule has none
	// Action is one of the Action constants.
	Action string
	Reason string
	// Position is where the rule's id stands.
	Position Position
}

// Corp are the organisation's rules, which apply to every VM of a machine.
type Corp struct {
	File  string
	Rules []Rule
}

// LoadCorp reads those of the files that exist, in their order.
func LoadCorp(files []string) ([]Corp, error) {
	var out []Corp
	for _, file := range files {
		data, err := readFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("loading the organisation's rules: %w", err)
		}
		doc, err := parse(file, data)
		if err != nil {
			return nil, err
		}
		t := doc.table()
		c := Corp{File: file, Rules: t.rules("rules")}
		t.close("default", "images", "mcp", "mounts", "resources", "hosts", "retention")
		if err := doc.err(); err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// rules reads the rules at key, in the order of the file.
func (t *table) rules(key string) []Rule {
	all := t.sub(key)
	if all == nil {
		return nil
	}
	names := all.names()
	if len(names) > maxRules {
		t.fail(key, "%s has %d entries, more than %d", key, len(names), maxRules)
		return nil
	}
	rules := make([]Rule, 0, len(names))
	for _, id := range names {
		sub := all.sub(id)
		if sub == nil {
			continue
		}
		if !validRuleID(id) {
			t.doc.fail(all.keyAt(id), "rule id %q is not valid: use %s", id, ruleIDRule)
			continue
		}
		rules = append(rules, sub.rule(id))
	}
	return rules
}

func (t *table) rule(id string) Rule {
	r := Rule{ID: id, Position: t.doc.keyPosition(t.path)}
	r.Match = t.expression("match")
	if !t.has("match") {
		t.doc.fail(r.Position, "rule %s has no match", id)
	}
	r.Unless = t.expression("unless")
	r.Action = t.choice("action", "", []string{ActionAllow, ActionBlock}, "ask", "rewrite", "preprocess", "postprocess")
	if !t.has("action") {
		t.doc.fail(r.Position, "rule %s has no action: use %s", id, alternatives([]string{ActionAllow, ActionBlock}))
	}
	r.Reason, _ = t.text("reason")
	if len(r.Reason) > maxText || strings.ContainsRune(r.Reason, 0) {
		t.fail("reason", "reason is longer than %d bytes or holds a zero byte", maxText)
	}
	t.close("severity", "timeout", "approvers", "set", "redact", "drop", "plugin", "mode")
	return r
}

func (t *table) expression(key string) Expression {
	s, ok := t.text(key)
	if !ok {
		return Expression{}
	}
	switch {
	case strings.TrimSpace(s) == "":
		t.fail(key, "%s is empty", key)
	case len(s) > maxExpression:
		t.fail(key, "%s is longer than %d bytes", key, maxExpression)
	}
	return Expression{s, t.doc.textPosition(join(t.path, key))}
}
