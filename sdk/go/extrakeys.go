package kvhash

import (
	"crypto/sha256"
	"fmt"
	"math/big"
	"unicode/utf8"
)

// Lora is a LoRA adapter as registered with the engine. Before 0.11.1 its ID is hashed, from 0.11.1 its Name, from
// 0.31 Name and Path (exactly as the engine got it). An empty field (or 0) is one that was not given.
type Lora struct {
	Name string
	Path string
	ID   int64
}

// MultimodalItem is an image, audio or video in the prompt: its content identifier and the placeholder tokens that
// it fills, counted from the start of the prompt.
type MultimodalItem struct {
	Identifier string
	Offset     int64
	Length     int64
}

// starts and ends may be near the limits of int64, so the end saturates.
func (m MultimodalItem) end() int64 {
	if end := m.Offset + m.Length; end >= m.Offset {
		return end
	}
	return 1<<63 - 1
}

// PromptEmbeds is a matrix of prompt embeddings, one row per prompt token, row-major, little-endian.
type PromptEmbeds struct {
	Rows, Hidden int64
	// Dtype is "float32", "float16" or "bfloat16".
	Dtype string
	Data  []byte
}

func (p *PromptEmbeds) rows(start, end int64) []byte {
	size := p.Hidden * int64(promptEmbedsDtypes[p.Dtype])
	start, end = min(start, p.Rows), min(end, p.Rows) // rows that do not exist are left out
	return p.Data[start*size : end*size]
}

// Keys is what one request adds to its blocks' hashes, besides the tokens. The zero value adds nothing.
type Keys struct {
	Lora *Lora
	// CacheSalt goes into block 0; the empty salt is no salt.
	CacheSalt string
	// Multimodal items are sorted by offset and do not overlap.
	Multimodal   []MultimodalItem
	PromptEmbeds *PromptEmbeds
}

func (k Keys) empty() bool {
	return k.Lora == nil && k.CacheSalt == "" && len(k.Multimodal) == 0 && k.PromptEmbeds == nil
}

func checkText(content string, code Code, at, what string) error {
	if !utf8.ValidString(content) {
		return fault(code, at, "%s is not UTF-8 (or holds a lone surrogate, which UTF-8 cannot carry)", what)
	}
	return nil
}

// check refuses what cannot be hashed. numTokens is the length of the whole prompt, -1 where it is not known yet.
func (k Keys) check(numTokens int64) error {
	if err := checkText(k.CacheSalt, CodeInvalidSalt, "$.cache_salt", "the cache salt"); err != nil {
		return err
	}
	if k.PromptEmbeds != nil {
		if err := k.PromptEmbeds.check(numTokens); err != nil {
			return err
		}
	}
	if k.Lora != nil {
		if err := checkText(k.Lora.Name, CodeInvalidLora, "$.lora.name", "the adapter's name"); err != nil {
			return err
		}
		if err := checkText(k.Lora.Path, CodeInvalidLora, "$.lora.path", "the adapter's path"); err != nil {
			return err
		}
		if k.Lora.ID < 0 {
			return fault(CodeInvalidLora, "$.lora.id", "expected the adapter's id, an integer of at least 1, got %d",
				k.Lora.ID)
		}
	}
	return checkItems(k.Multimodal, numTokens)
}

func (p *PromptEmbeds) check(numTokens int64) error {
	const at = "$.prompt_embeds"
	size, known := promptEmbedsDtypes[p.Dtype]
	switch {
	case p.Rows < 0:
		return fault(CodeInvalidPromptEmbeds, at+".shape[0]", "expected the number of rows, at least 0, got %d", p.Rows)
	case p.Hidden < 1:
		return fault(CodeInvalidPromptEmbeds, at+".shape[1]", "expected the hidden size, at least 1, got %d", p.Hidden)
	case !known:
		return fault(CodeInvalidPromptEmbeds, at+".dtype",
			"unknown dtype %q; expected one of: float32, float16, bfloat16", p.Dtype)
	}
	needed := new(big.Int).Mul(big.NewInt(p.Rows), big.NewInt(p.Hidden))
	needed.Mul(needed, big.NewInt(int64(size)))
	if needed.Cmp(big.NewInt(int64(len(p.Data)))) != 0 {
		return fault(CodeInvalidPromptEmbeds, at+".data", "%d rows of %d %s are %d bytes, got %d",
			p.Rows, p.Hidden, p.Dtype, needed, len(p.Data))
	}
	if p.Rows < numTokens {
		return fault(CodeInvalidPromptEmbeds, at+".shape[0]", "%d rows for %d tokens; expected a row per token",
			p.Rows, numTokens)
	}
	return nil
}

func checkItems(items []MultimodalItem, numTokens int64) error {
	for i, item := range items {
		at := fmt.Sprintf("$.multimodal[%d]", i)
		if err := checkText(item.Identifier, CodeInvalidMultimodal, at+".identifier", "the identifier"); err != nil {
			return err
		}
		switch {
		case item.Offset < 0:
			return fault(CodeInvalidMultimodal, at+".offset", "expected the offset, at least 0, got %d", item.Offset)
		case item.Length < 1:
			return fault(CodeInvalidMultimodal, at+".length", "expected the length, at least 1, got %d", item.Length)
		case i > 0 && item.Offset < items[i-1].Offset:
			return fault(CodeInvalidMultimodal, at+".offset", "items must be sorted by offset: %d comes after %d",
				item.Offset, items[i-1].Offset)
		case i > 0 && item.Offset < items[i-1].end():
			return fault(CodeInvalidMultimodal, at+".offset",
				"items must not overlap: the one before ends at %d, this starts at %d", items[i-1].end(), item.Offset)
		case numTokens >= 0 && item.end() > numTokens:
			return fault(CodeInvalidMultimodal, at+".length",
				"the item ends at %d, past the %d tokens of the prompt", item.end(), numTokens)
		}
	}
	return nil
}

func (l *Lora) key(contract Contract) (value, error) {
	missing := func(what string) error {
		return fault(CodeInvalidLora, "$.lora."+what, "vLLM %s hashes the adapter's %s, and none was given",
			contract.Release, what)
	}
	if contract.LoraKey == "id" {
		if l.ID == 0 {
			return nil, missing("id")
		}
		return signed(l.ID), nil
	}
	if l.Name == "" {
		return nil, missing("name")
	}
	if contract.LoraKey == "name" {
		return text(l.Name), nil
	}
	if l.Path == "" {
		return nil, missing("path")
	}
	return tuple{tagLora, text(l.Name), text(l.Path)}, nil
}

func (m MultimodalItem) key(start int64, contract Contract) value {
	switch {
	case contract.MultimodalKey == "identifier":
		return text(m.Identifier)
	case contract.TaggedKeys:
		return tuple{tagMultimodal, text(m.Identifier), signed(m.Offset - start)}
	default:
		return tuple{text(m.Identifier), signed(m.Offset - start)}
	}
}

func tagged(tag *ref, content value, contract Contract) value {
	if contract.TaggedKeys {
		return tuple{tag, content}
	}
	return content
}

// block returns the extra keys of the tokens start to end as the release hashes them: in every release LoRA,
// multimodal items, salt, prompt embeddings; nil without any. Items before firstItem are known to end before start.
func (k Keys) block(contract Contract, start, end int64, firstItem int) tuple {
	var keys tuple
	if k.Lora != nil {
		key, _ := k.Lora.key(contract) // checked when the chain began
		keys = append(keys, key)
	}
	for _, item := range k.Multimodal[firstItem:] {
		if item.Offset >= end {
			break
		}
		if item.end() > start {
			keys = append(keys, item.key(start, contract))
		}
	}
	if k.CacheSalt != "" && start == 0 {
		keys = append(keys, tagged(tagCacheSalt, text(k.CacheSalt), contract))
	}
	if k.PromptEmbeds != nil && contract.PromptEmbedsKey != "absent" {
		content := k.PromptEmbeds.rows(start, end)
		if contract.PromptEmbedsKey == "sha256" {
			digest := sha256.Sum256(content)
			content = digest[:]
		}
		keys = append(keys, tagged(tagPromptEmbeds, octets(content), contract))
	}
	return keys
}

// ExtraKeys are the extra keys of one block as Go values: string, []byte, uint64, *big.Int (a negative offset) and
// []any for a tuple. A block without keys has nil.
type ExtraKeys []any

func export(v value) any {
	switch v := v.(type) {
	case uinteger:
		return uint64(v)
	case bigInteger:
		return v.Int
	case text:
		return string(v)
	case octets:
		return []byte(v)
	case *ref:
		return string(v.text)
	case tuple:
		if v == nil {
			return nil
		}
		return exportTuple(v)
	default:
		return nil
	}
}

func exportTuple(v tuple) []any {
	if v == nil {
		return nil
	}
	items := make([]any, len(v))
	for i, item := range v {
		items[i] = export(item)
	}
	return items
}

// untag returns the keys of one block as its event publishes them, whatever the hash holds: a multimodal key as
// (identifier, offset), every other as its first value.
func untag(keys tuple, contract Contract) tuple {
	if keys == nil || !contract.TaggedKeys {
		return keys
	}
	untagged := make(tuple, len(keys))
	for i, key := range keys {
		key := key.(tuple)
		if key[0] == value(tagMultimodal) {
			untagged[i] = key[1:]
		} else {
			untagged[i] = key[1]
		}
	}
	return untagged
}
