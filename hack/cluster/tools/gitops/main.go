// gitops reads one object (JSON) from standard input and says what tools that wait for it make of it, one word a line:
// kstatus (Flux, kpt), Flux with the expressions of a file, and Argo CD with the Lua of a file, run as Argo CD runs it.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "gitops:", err)
		os.Exit(1)
	}
}

// value is an object as Lua has it.
func value(state *lua.LState, from any) lua.LValue {
	switch from := from.(type) {
	case map[string]any:
		table := state.NewTable()
		for key, one := range from {
			table.RawSetString(key, value(state, one))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, one := range from {
			table.Append(value(state, one))
		}
		return table
	case string:
		return lua.LString(from)
	case bool:
		return lua.LBool(from)
	case int64:
		return lua.LNumber(from)
	case float64:
		return lua.LNumber(from)
	}
	return lua.LNil
}

func argo(script string, object map[string]any) string {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		state.Push(state.NewFunction(open))
		state.Push(lua.LString(name))
		state.Call(1, 0)
	}
	state.SetGlobal("obj", value(state, object))
	check(state.DoString(script))
	return state.CheckTable(-1).RawGetString("status").String()
}

func main() {
	if len(os.Args) != 3 {
		check(fmt.Errorf("usage: gitops EXPRESSIONS.json HEALTH.lua < OBJECT.json"))
	}
	object, expressions := &unstructured.Unstructured{}, &kustomize.HealthCheckExpressions{}
	check(json.NewDecoder(os.Stdin).Decode(object))
	given, err := os.ReadFile(os.Args[1])
	check(err)
	check(json.Unmarshal(given, expressions))
	script, err := os.ReadFile(os.Args[2])
	check(err)
	plain, err := status.Compute(object)
	check(err)
	evaluator, err := cel.NewStatusEvaluator(expressions)
	check(err)
	flux, err := evaluator.Evaluate(context.Background(), object)
	check(err)
	fmt.Println(plain.Status)
	fmt.Println(flux.Status)
	fmt.Println(argo(string(script), object.Object))
}
