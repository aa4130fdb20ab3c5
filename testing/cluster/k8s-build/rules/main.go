// What Prometheus itself makes of expressions, rules and alerts. Reads one question as JSON, answers
// in JSON. promtool would do most of it, and brings the clients of every cloud: three times the build.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// Question has expressions to be parsed and, with series, to be evaluated at the end of them.
type Question struct {
	Expressions []string `json:"expressions"`
	Rules       string   `json:"rules"`  // a rule file; its groups are evaluated at each step
	Series      string   `json:"series"` // in the notation of PromQL's own tests: "load 30s ..."
	StepS       int      `json:"step_s"`
	UntilS      int      `json:"until_s"`
}

// Use is a label that an expression expects a metric to have.
type Use struct {
	Metric string `json:"metric"`
	Label  string `json:"label"`
	Value  string `json:"value"` // of a selector with =
}

// Answer has one entry per expression, and what fires at the end.
type Answer struct {
	Faults  []string            `json:"faults"`
	Uses    [][]Use             `json:"uses"`
	Results []int               `json:"results"`
	Rules   map[string]string   `json:"rules"` // name -> expression
	Firing  []map[string]string `json:"firing"`
}

func main() {
	var question Question
	if err := json.NewDecoder(os.Stdin).Decode(&question); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	answer := Answer{Faults: []string{}, Firing: []map[string]string{}, Rules: map[string]string{}}
	language := parser.NewParser(parser.Options{})
	for _, text := range question.Expressions {
		expression, err := language.ParseExpr(text)
		if err != nil {
			answer.Faults = append(answer.Faults, fmt.Sprintf("%v: %s", err, text))
			answer.Uses = append(answer.Uses, nil)
			continue
		}
		answer.Uses = append(answer.Uses, uses(expression, nil))
	}
	if question.Series != "" {
		if err := answer.run(question, language); err != nil {
			answer.Faults = append(answer.Faults, err.Error())
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
		os.Exit(2)
	}
}

// uses walks an expression with the labels that the operators around it group or match by.
func uses(node parser.Node, around []string) []Use {
	found := []Use{}
	switch n := node.(type) {
	case *parser.VectorSelector:
		found = append(found, Use{n.Name, "", ""})
		for _, matcher := range n.LabelMatchers {
			if matcher.Name == labels.MetricName {
				continue
			}
			value := ""
			if matcher.Type == labels.MatchEqual {
				value = matcher.Value
			}
			found = append(found, Use{n.Name, matcher.Name, value})
		}
		for _, label := range around {
			found = append(found, Use{n.Name, label, ""})
		}
		return found
	case *parser.AggregateExpr:
		// What is aggregated away below is no business of what is around.
		if !n.Without {
			around = n.Grouping
		}
	case *parser.BinaryExpr:
		matching := n.VectorMatching
		if matching == nil || !matching.On {
			break
		}
		// A side that only decides or is the "one" of many gives the result no other labels.
		both := append(append([]string{}, around...), matching.MatchingLabels...)
		left, right := both, both
		if n.Op == parser.LAND || n.Op == parser.LUNLESS || matching.Card == parser.CardManyToOne {
			right = matching.MatchingLabels
		} else if matching.Card == parser.CardOneToMany {
			left = matching.MatchingLabels
		}
		return append(uses(n.LHS, left), uses(n.RHS, right)...)
	}
	for child := range parser.ChildrenIter(node) {
		found = append(found, uses(child, around)...)
	}
	return found
}

func (answer *Answer) run(question Question, language parser.Parser) error {
	step := time.Duration(question.StepS) * time.Second
	suite, err := promqltest.NewLazyLoader(question.Series, promqltest.LazyLoaderOpts{})
	if err != nil {
		return err
	}
	defer suite.Close()
	query := rules.EngineQueryFunc(suite.QueryEngine(), suite.Storage())
	manager := rules.NewManager(&rules.ManagerOptions{
		QueryFunc:  query,
		Appendable: suite.Storage(),
		Context:    context.Background(),
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
		Logger:     slog.New(slog.NewTextHandler(io.Discard, nil)),
		Parser:     language,
	})
	groups, faults := manager.LoadGroups(step, labels.EmptyLabels(), "", nil, false, question.Rules)
	if len(faults) > 0 {
		return faults[0]
	}
	every(groups, func(rule rules.Rule) { answer.Rules[rule.Name()] = rule.Query().String() })
	end := time.Unix(int64(question.UntilS), 0).UTC()
	for at := time.Unix(0, 0).UTC(); !at.After(end); at = at.Add(step) {
		suite.WithSamplesTill(at, func(fault error) {
			if fault != nil {
				err = fault
				return
			}
			// Recorded series first: groups that use them see those of this moment.
			for _, group := range ordered(groups) {
				group.Eval(suite.Context(), at)
			}
		})
		if err != nil {
			return err
		}
	}
	every(groups, func(rule rules.Rule) {
		if rule.LastError() != nil {
			answer.Faults = append(answer.Faults, rule.Name()+": "+rule.LastError().Error())
		}
		if alert, ok := rule.(*rules.AlertingRule); ok {
			for _, active := range alert.ActiveAlerts() {
				if active.State == rules.StateFiring {
					told := active.Labels.Map()
					for name, text := range active.Annotations.Map() {
						told["annotation:"+name] = text
					}
					answer.Firing = append(answer.Firing, told)
				}
			}
		}
	})
	for _, text := range question.Expressions {
		vector, err := query(suite.Context(), text, end)
		if err != nil {
			answer.Faults = append(answer.Faults, fmt.Sprintf("%v: %s", err, text))
		}
		answer.Results = append(answer.Results, len(vector))
	}
	return nil
}

func every(groups map[string]*rules.Group, do func(rules.Rule)) {
	for _, group := range ordered(groups) {
		for _, rule := range group.Rules() {
			do(rule)
		}
	}
}

// ordered: groups that only record come first.
func ordered(groups map[string]*rules.Group) []*rules.Group {
	recording, alerting := []*rules.Group{}, []*rules.Group{}
	for _, group := range groups {
		if len(group.AlertingRules()) == 0 {
			recording = append(recording, group)
		} else {
			alerting = append(alerting, group)
		}
	}
	return append(recording, alerting...)
}
