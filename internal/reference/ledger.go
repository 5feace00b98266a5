package reference

import (
	"strings"

	"github.com/capsem/capsem/internal/ledger"
)

func ledgerPage() string {
	p := newPage("Ledger", "The tables of a VM's ledger, an SQLite file that `capsem sql VM \"SELECT …\"` reads. "+
		"Rows are added and never removed. What stands under *when known* as intent was written before the act and never changes; "+
		"an outcome is written once, when the act is done.")
	p.text("`capsem timeline` shows the layers " + strings.Join(quoted(ledger.Layers()), ", ") + ".")
	p.text("Every table has `id`, which counts its rows, and `begin_digest` and `digest`, which are for the chain of digests that follows.")
	for _, t := range ledger.Tables() {
		p.heading(2, t.Name)
		p.text(strings.ToUpper(t.Doc[:1]) + t.Doc[1:] + ".")
		if t.State != "" {
			p.text("`" + t.State + "` says how far it came: `pending` until the outcome is written, and `interrupted` where the process died before that.")
		}
		var rows [][]string
		for _, c := range t.Columns {
			stage := "intent"
			if c.Stage == ledger.Outcome {
				stage = "outcome"
			}
			rows = append(rows, []string{code(c.Name), strings.ToLower(c.Type), stage, c.Doc})
		}
		p.rows([]string{"column", "type", "when known", "what"}, rows)
	}
	return p.String()
}

func quoted(words []string) []string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = code(w)
	}
	return out
}
