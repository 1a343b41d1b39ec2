package kvhash

import "strconv"

// AppendJSON appends the batch as event lines carry it: every field of each event, nil as null; a hash as
// {"int": decimal} or {"bytes": hex}; "extra" only where there are unknown fields.
func (b *EventBatch) AppendJSON(out []byte) []byte {
	o := jsonWriter{out: append(out, '{')}
	o.field("ts", b.Timestamp)
	o.field("data_parallel_rank", optional(b.DataParallelRank))
	if b.Layout == "" {
		o.field("layout", nil)
	} else {
		o.field("layout", b.Layout)
	}
	o.name("events")
	o.out = append(o.out, '[')
	for i, event := range b.Events {
		o.out = appendJSONEvent(comma(o.out, i), event)
	}
	o.out = append(o.out, ']')
	o.extra(b.Extra)
	return append(o.out, '}')
}

func appendJSONEvent(out []byte, event Event) []byte {
	o := jsonWriter{out: append(out, '{')}
	switch e := event.(type) {
	case *BlockStored:
		o.field("type", "BlockStored")
		o.field("block_hashes", hashValues(e.BlockHashes))
		if e.ParentBlockHash == nil {
			o.field("parent_block_hash", nil)
		} else {
			o.field("parent_block_hash", e.ParentBlockHash.export())
		}
		o.field("token_ids", e.TokenIDs.export())
		o.field("block_size", e.BlockSize)
		o.field("lora_id", optional(e.LoraID))
		o.field("medium", optional(e.Medium))
		o.field("lora_name", optional(e.LoraName))
		o.field("extra_keys", lists(e.ExtraKeys))
		o.field("group_idx", optional(e.GroupIdx))
		o.field("kv_cache_spec_kind", optional(e.KVCacheSpecKind))
		o.field("kv_cache_spec_sliding_window", optional(e.KVCacheSpecSlidingWindow))
		o.field("locality", optional(e.Locality))
		o.field("ownership", optional(e.Ownership))
		o.field("session_id", optional(e.SessionID))
		o.field("lookahead_token_ids", lists(e.LookaheadTokenIDs))
		o.field("cache_salt", optional(e.CacheSalt))
		o.extra(e.Extra)
	case *BlockRemoved:
		o.field("type", "BlockRemoved")
		o.field("block_hashes", hashValues(e.BlockHashes))
		o.field("medium", optional(e.Medium))
		o.field("group_idx", optional(e.GroupIdx))
		o.field("locality", optional(e.Locality))
		o.field("ownership", optional(e.Ownership))
		o.extra(e.Extra)
	case *AllBlocksCleared:
		o.field("type", "AllBlocksCleared")
		o.extra(e.Extra)
	case *UnknownEvent:
		o.field("unknown", e.Tag)
		o.field("raw", e.Raw)
	case *UndecodableEvent:
		o.field("undecodable", e.Path)
		o.field("message", e.Message)
		o.field("raw", e.Raw)
	}
	return append(o.out, '}')
}

type jsonWriter struct {
	out   []byte
	count int
}

func (o *jsonWriter) name(name string) {
	o.out = append(appendJSONText(comma(o.out, o.count), name), ':')
	o.count++
}

func (o *jsonWriter) field(name string, v any) {
	o.name(name)
	o.out = appendJSONValue(o.out, v)
}

func (o *jsonWriter) extra(fields []ExtraField) {
	if len(fields) == 0 {
		return
	}
	o.name("extra")
	inner := jsonWriter{out: append(o.out, '{')}
	for _, field := range fields {
		name := field.Name
		if field.Position > 0 {
			name = strconv.Itoa(field.Position)
		}
		inner.field(name, field.Value)
	}
	o.out = append(inner.out, '}')
}

func optional[T any](v *T) any {
	if v == nil {
		return nil
	}
	return *v
}

func lists[T any](blocks [][]T) any {
	if blocks == nil {
		return nil
	}
	all := make([]any, len(blocks))
	for i, block := range blocks {
		if block != nil {
			all[i] = values(block)
		}
	}
	return all
}

func values[T any](items []T) []any {
	all := make([]any, len(items))
	for i, item := range items {
		all[i] = item
	}
	return all
}

func (h HashValue) export() any {
	if digest, isBytes := h.Bytes(); isBytes {
		return digest
	}
	return WireMap{{"int", h.number.String()}}
}

func hashValues(hashes []HashValue) []any {
	all := make([]any, len(hashes))
	for i, hash := range hashes {
		all[i] = hash.export()
	}
	return all
}

func (t TokenIDs) export() []any {
	if t.Pairs == nil {
		return values(t.Singles)
	}
	all := make([]any, len(t.Pairs))
	for i, pair := range t.Pairs {
		all[i] = values(pair[:])
	}
	return all
}
