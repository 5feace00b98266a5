package policy

import (
	"fmt"

	"cel.dev/cel-go/cel"
	celcost "cel.dev/cel-go/common/cost"
	"cel.dev/cel-go/common/types"
)

// cost is an upper estimate of what an expression costs to evaluate, in CEL's
// units: roughly one for a field, an operator or ten characters looked at.
type cost uint64

const (
	// maxStaticCost is what a rule may cost by estimate and run without a limit.
	maxStaticCost cost = 1_000_000
	// maxRuntimeCost is what a rule over maxStaticCost may cost in fact. It takes
	// some hundred milliseconds. Over it the rule is broken.
	maxRuntimeCost = 2_000_000

	// What the estimate takes a message to hold at most. What holds more costs
	// more, in proportion where there are no nested loops.
	estimatedText     = 64 << 10
	estimatedElements = 1000
)

func (c cost) expensive() bool { return c > maxStaticCost }

// estimate says what an expression can cost.
func (v *vocabulary) estimate(checked *cel.Ast) (cost, error) {
	e, err := v.typed.EstimateCost(checked, sizes{})
	if err != nil {
		return 0, fmt.Errorf("estimating the cost of a rule: %w", err)
	}
	return cost(e.Max), nil
}

// sizes tells CEL how large a message's values are.
type sizes struct{}

// EstimateSize bounds what is not known before. It is called by CEL.
func (sizes) EstimateSize(node celcost.AstNode) *celcost.SizeEstimate {
	switch node.Type().Kind() {
	case types.StringKind, types.BytesKind:
		return &celcost.SizeEstimate{Max: estimatedText}
	case types.ListKind, types.MapKind:
		return &celcost.SizeEstimate{Max: estimatedElements}
	case types.DynKind:
		return &celcost.SizeEstimate{Max: estimatedText}
	default:
		return nil
	}
}

// EstimateCallCost leaves the cost of calls to CEL, but for the functions that it
// does not know. It is called by CEL.
func (sizes) EstimateCallCost(function, _ string, _ *celcost.AstNode, _ []celcost.AstNode) *celcost.CallEstimate {
	switch function {
	case "icontains", matchesCall, imatchesCall:
		return &celcost.CallEstimate{CostEstimate: celcost.Estimate{Max: estimatedText}}
	}
	return nil
}
