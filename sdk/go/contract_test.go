package kvhash

import (
	"encoding/json"
	"os"
	"reflect"
	"testing"
)

// The compiled table equals ../contract.json field by field, so that a port in any language has the Python table.
func TestContractTableEqualsContractJSON(t *testing.T) {
	data, err := os.ReadFile("../contract.json")
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]any
	if err := json.Unmarshal(data, &want); err != nil {
		t.Fatal(err)
	}
	var contracts, algorithms, changes []any
	for _, c := range contractTable {
		var seed any
		if c.HasDefaultSeed {
			seed = c.DefaultSeed
		}
		contracts = append(contracts, map[string]any{
			"since": c.Release.String(), "algorithms": c.Algorithms, "chain_values": c.ChainValues, "default_seed": seed,
			"lora_key": c.LoraKey, "multimodal_key": c.MultimodalKey, "prompt_embeds_key": c.PromptEmbedsKey,
			"tagged_keys": c.TaggedKeys, "lookahead": c.Lookahead,
			"events": map[string]any{
				"layout": c.Events.Layout, "block_stored": fieldRows(c.Events.BlockStored),
				"block_removed": fieldRows(c.Events.BlockRemoved), "hash_bytes": c.Events.HashBytes,
				"replay_topic_frame": c.Events.ReplayTopicFrame,
			},
		})
	}
	for _, a := range algorithmTable {
		algorithms = append(algorithms, map[string]any{
			"name": a.Name, "serialization": a.Serialization, "digest": a.Digest, "keeps": a.Keeps,
			"collision_resistant": a.CollisionResistant(),
		})
	}
	for i, c := range changeTable {
		row := want["changes"].([]any)[i].(map[string]any)
		changes = append(changes, map[string]any{"since": row["since"], "summary": row["summary"]})
		if c.Since.String() != row["since"] || c.Summary != row["summary"] {
			t.Errorf("change %d: %v, want %v", i, c, row)
		}
	}
	if len(changes) != len(want["changes"].([]any)) {
		t.Errorf("%d changes, want %d", len(changes), len(want["changes"].([]any)))
	}
	for name, got := range map[string]any{
		"contracts": contracts, "algorithms": algorithms, "prompt_embeds_dtypes": promptEmbedsDtypes,
		"oldest": oldestRelease.String(), "newest": newestRelease.String(), "oldest_events": oldestEventsRelease.String(),
	} {
		if !reflect.DeepEqual(throughJSON(t, got), want[name]) {
			t.Errorf("%s differs from contract.json: %v", name, got)
		}
	}
}

func fieldRows(fields []EventField) []any {
	rows := []any{}
	for _, field := range fields {
		rows = append(rows, map[string]any{"name": field.Name, "optional": field.Optional})
	}
	return rows
}

func throughJSON(t *testing.T, v any) (out any) {
	t.Helper()
	data, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(data, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Releases are read in every form that a version string has, and compared as numbers.
func TestContractForReadsReleases(t *testing.T) {
	for input, want := range map[string]string{
		"0.33.0": "0.33.0", "v0.31": "0.31.0", "0.10.1.1": "0.10.1", "0.31.0rc2.dev7+g1234": "0.31.0", " latest ": "0.33.0",
	} {
		if contract, err := ContractFor(input); err != nil || contract.Release.String() != want {
			t.Errorf("%q: %v, %v; want %s", input, contract.Release, err, want)
		}
	}
	if newer, err := ContractFor("9.0"); err != nil || newer.Known() || !newer.Lookahead {
		t.Errorf("a newer release must work as the newest and say so: %v, %v", newer, err)
	}
}
