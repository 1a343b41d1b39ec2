package kvhash

import (
	"errors"
	"fmt"
	"strconv"
)

// MaxPayloadBytes is the largest event payload that is read.
const MaxPayloadBytes = 256 * 1024 * 1024

// DecodeBatch reads the payload frame of one published message: every vLLM release's shape and SGLang's, array, map
// or mixed. A field's meaning comes from its name or its place, never from its value's type. One bad event does not
// lose its batch: it becomes an UndecodableEvent in place. A payload that is no batch is an *Error with
// CodeInvalidMsgpack, CodeNestedTooDeeply, CodePayloadTooLarge or CodeInvalidBatch.
func DecodeBatch(payload []byte) (*EventBatch, error) {
	if len(payload) > MaxPayloadBytes {
		return nil, fault(CodePayloadTooLarge, "$", "the payload has %d bytes; at most %d are read", len(payload),
			MaxPayloadBytes)
	}
	if len(payload) == 0 {
		return nil, fault(CodeInvalidBatch, "$", "the payload is empty; expected a msgpack array [ts, [events], rank]")
	}
	read := arrayContainer
	if isPackMap(payload) {
		read = mapContainer
	}
	batch, events, err := read(payload)
	if err != nil {
		return nil, err
	}
	arrays, maps := false, false
	for i, raw := range events {
		arrays, maps = arrays || isPackArray(raw), maps || isPackMap(raw)
		batch.Events = append(batch.Events, decodeEvent(raw, fmt.Sprintf("$.events[%d]", i)))
	}
	switch {
	case arrays && maps:
		batch.Layout = "mixed"
	case arrays:
		batch.Layout = "array"
	case maps:
		batch.Layout = "map"
	}
	return batch, nil
}

func packFault(err error, at string) error {
	if errors.Is(err, errTooDeep) {
		return fault(CodeNestedTooDeeply, at, "nested too deeply")
	}
	return fault(CodeInvalidMsgpack, at, "not msgpack: %s", err)
}

func arrayContainer(payload []byte) (*EventBatch, [][]byte, error) {
	if !isPackArray(payload) {
		v, err := decodePack(payload)
		if err != nil {
			return nil, nil, packFault(err, "$")
		}
		return nil, nil, fault(CodeInvalidBatch, "$", "expected a msgpack array [ts, [events], rank], got %s", packKind(v))
	}
	parts, err := splitPackArray(payload)
	if err != nil {
		return nil, nil, packFault(err, "$")
	}
	if len(parts) < 2 {
		return nil, nil, fault(CodeInvalidBatch, "$",
			"expected an array [ts, [events], rank] of at least 2 elements, got %d", len(parts))
	}
	var rank any
	if len(parts) > 2 {
		if rank, err = decodePack(parts[2]); err != nil {
			return nil, nil, packFault(err, "$.data_parallel_rank")
		}
	}
	batch := &EventBatch{}
	for i := 3; i < len(parts); i++ {
		v, err := decodePack(parts[i])
		if err != nil {
			return nil, nil, packFault(err, "$["+strconv.Itoa(i)+"]")
		}
		batch.Extra = append(batch.Extra, ExtraField{Position: i, Value: v})
	}
	ts, err := decodePack(parts[0])
	if err != nil {
		return nil, nil, packFault(err, "$.ts")
	}
	events, err := eventList(parts[1])
	if err != nil {
		return nil, nil, err
	}
	return batch, events, batch.set(ts, rank)
}

func mapContainer(payload []byte) (*EventBatch, [][]byte, error) {
	reader := packReader{data: payload}
	head, err := reader.head()
	if err != nil {
		return nil, nil, packFault(err, "$")
	}
	var names []string
	parts := map[string][]byte{}
	for ; head.items > 0; head.items-- {
		key, err := reader.value()
		if err != nil {
			return nil, nil, packFault(err, "$")
		}
		name, isText := key.(string)
		if !isText {
			return nil, nil, fault(CodeInvalidMsgpack, "$", "expected field names as text, got %s", packKind(key))
		}
		start := reader.position
		if err := reader.skip(); err != nil {
			return nil, nil, packFault(err, "$")
		}
		if _, met := parts[name]; !met {
			names = append(names, name)
		}
		parts[name] = payload[start:reader.position]
	}
	if reader.position != len(payload) {
		return nil, nil, packFault(errTrailing, "$")
	}
	for _, name := range []string{"ts", "events"} {
		if _, given := parts[name]; !given {
			return nil, nil, fault(CodeInvalidBatch, "$", "the batch has no '%s'", name)
		}
	}
	events, err := eventList(parts["events"])
	if err != nil {
		return nil, nil, err
	}
	batch := &EventBatch{}
	var ts, rank, otherRank any
	for _, name := range names {
		if name == "events" {
			continue
		}
		v, err := decodePack(parts[name])
		if err != nil {
			return nil, nil, packFault(err, "$."+name)
		}
		switch name {
		case "ts":
			ts = v
		case "data_parallel_rank":
			rank = v
		case "attn_dp_rank": // SGLang's name
			otherRank = v
		default:
			batch.Extra = append(batch.Extra, ExtraField{Name: name, Value: v})
		}
	}
	if rank == nil {
		rank = otherRank
	}
	return batch, events, batch.set(ts, rank)
}

func eventList(raw []byte) ([][]byte, error) {
	if !isPackArray(raw) {
		v, err := decodePack(raw)
		if err != nil {
			return nil, packFault(err, "$.events")
		}
		return nil, fault(CodeInvalidBatch, "$.events", "expected a list of events, got %s", packKind(v))
	}
	events, err := splitPackArray(raw)
	if err != nil {
		return nil, packFault(err, "$.events")
	}
	return events, nil
}

func (b *EventBatch) set(ts, rank any) error {
	switch ts := ts.(type) {
	case float64:
		b.Timestamp = ts
	case Integer:
		b.Timestamp = float64(ts.bits)
		if ts.negative {
			b.Timestamp = float64(int64(ts.bits))
		}
	default:
		return fault(CodeInvalidBatch, "$.ts", "expected the time as a number, got %s", packKind(ts))
	}
	if rank == nil {
		return nil
	}
	number, isInteger := rank.(Integer)
	if !isInteger {
		return fault(CodeInvalidBatch, "$.data_parallel_rank",
			"expected the data parallel rank as an integer or nil, got %s", packKind(rank))
	}
	b.DataParallelRank = &number
	return nil
}

// --- one event ---------------------------------------------------------------------------------------------------

func placesOf(tag string) []EventField {
	switch newest := contractTable[len(contractTable)-1].Events; tag {
	case "BlockStored":
		return newest.BlockStored
	case "BlockRemoved":
		return newest.BlockRemoved
	}
	return nil
}

func decodeEvent(raw []byte, at string) Event {
	taker := eventTaker{at: at}
	v, err := decodePack(raw)
	if err != nil {
		message := "not msgpack: " + err.Error()
		if errors.Is(err, errTooDeep) {
			message = "nested too deeply"
		}
		return &UndecodableEvent{Path: at, Message: message, Raw: raw}
	}
	tag := taker.name(v)
	var event Event
	switch {
	case taker.message != "":
	case tag == "BlockStored":
		event = taker.stored()
	case tag == "BlockRemoved":
		event = taker.removed()
	case tag == "AllBlocksCleared":
		event = &AllBlocksCleared{Extra: taker.rest()}
	default:
		event = &UnknownEvent{Tag: tag, Raw: raw}
	}
	if taker.message != "" {
		return &UndecodableEvent{Path: taker.path, Message: taker.message, Tag: tag, Raw: raw}
	}
	return event
}

// eventTaker takes one event's fields one by one, checked; what is left over is the rest. The first fault is kept,
// and what is taken after it has no meaning.
type eventTaker struct {
	at            string
	fields        []ExtraField
	hashKind      string
	path, message string
}

func (t *eventTaker) refuse(path, format string, arguments ...any) {
	if t.message == "" {
		t.path, t.message = path, fmt.Sprintf(format, arguments...)
	}
}

// name reads the tag, and the fields under their names.
func (t *eventTaker) name(v any) string {
	switch v := v.(type) {
	case WireMap:
		return t.nameMap(v)
	case []any:
		if len(v) == 0 {
			t.refuse(t.at, "expected an event, got an empty array")
			return ""
		}
		return t.nameArray(v)
	}
	t.refuse(t.at, "expected an event, a map or an array, got %s", packKind(v))
	return ""
}

func (t *eventTaker) nameMap(v WireMap) string {
	typed, given := v.get("type")
	if !given {
		t.refuse(t.at, "the event has no 'type'")
		return ""
	}
	tag, isText := typed.(string)
	if !isText {
		t.refuse(t.at+".type", "expected the event's type as text, got %s", packKind(typed))
		return ""
	}
	for _, pair := range v {
		name, isText := pair.Key.(string)
		if !isText {
			t.refuse(t.at, "expected field names as text, got %s", packKind(pair.Key))
			return ""
		}
		if name != "type" {
			t.put(name, pair.Value)
		}
	}
	return tag
}

func (t *eventTaker) nameArray(v []any) string {
	tag, isText := v[0].(string)
	if !isText {
		t.refuse(t.at+"[0]", "expected the event's type as text, got %s", packKind(v[0]))
		return ""
	}
	places := placesOf(tag)
	for i, item := range v[1:] {
		if i < len(places) {
			t.fields = append(t.fields, ExtraField{Name: places[i].Name, Value: item})
		} else {
			t.fields = append(t.fields, ExtraField{Position: i + 1, Value: item})
		}
	}
	if tag != "BlockStored" {
		return tag
	}
	// SGLang's array puts an object of named fields in the place of lora_name. Its names say what they are, so
	// nothing is guessed.
	for i, field := range t.fields {
		if named, isMap := field.Value.(WireMap); field.Name == "lora_name" && isMap {
			t.fields = append(t.fields[:i:i], t.fields[i+1:]...)
			for _, pair := range named {
				t.put(wireName(pair.Key), pair.Value)
			}
			break
		}
	}
	return tag
}

// put sets a field by name; of a name that stands twice the last value counts.
func (t *eventTaker) put(name string, v any) {
	for i := range t.fields {
		if t.fields[i].Name == name && name != "" {
			t.fields[i].Value = v
			return
		}
	}
	t.fields = append(t.fields, ExtraField{Name: name, Position: -1, Value: v})
}

func (t *eventTaker) rest() []ExtraField { return t.fields }

func (t *eventTaker) take(name string) (any, bool) {
	for i, field := range t.fields {
		if field.Name == name {
			t.fields = append(t.fields[:i:i], t.fields[i+1:]...)
			return field.Value, true
		}
	}
	return nil, false
}

func (t *eventTaker) require(name string) any {
	v, given := t.take(name)
	if !given {
		t.refuse(t.at, "the event has no '%s'", name)
	}
	return v
}

func (t *eventTaker) stored() *BlockStored {
	event := &BlockStored{
		BlockHashes:              t.hashes("block_hashes"),
		ParentBlockHash:          t.parent("parent_block_hash"),
		TokenIDs:                 t.tokens("token_ids"),
		BlockSize:                t.size("block_size"),
		LoraID:                   t.integer("lora_id"),
		Medium:                   t.text("medium"),
		LoraName:                 t.text("lora_name"),
		ExtraKeys:                t.extraKeys("extra_keys"),
		GroupIdx:                 t.integer("group_idx"),
		KVCacheSpecKind:          t.text("kv_cache_spec_kind"),
		KVCacheSpecSlidingWindow: t.integer("kv_cache_spec_sliding_window"),
		Locality:                 t.text("locality"),
		Ownership:                t.text("ownership"),
		SessionID:                t.text("session_id"),
		LookaheadTokenIDs:        t.lookahead("lookahead_token_ids"),
		CacheSalt:                t.text("cache_salt"),
	}
	event.Extra = t.rest()
	return event
}

func (t *eventTaker) removed() *BlockRemoved {
	event := &BlockRemoved{
		BlockHashes: t.hashes("block_hashes"),
		Medium:      t.text("medium"),
		GroupIdx:    t.integer("group_idx"),
		Locality:    t.text("locality"),
		Ownership:   t.text("ownership"),
	}
	event.Extra = t.rest()
	return event
}

func (t *eventTaker) integer(name string) *Integer {
	v, _ := t.take(name)
	if v == nil {
		return nil
	}
	number, isInteger := v.(Integer)
	if !isInteger {
		t.refuse(t.at+"."+name, "expected an integer or nil, got %s", packKind(v))
	}
	return &number
}

func (t *eventTaker) text(name string) *string {
	v, _ := t.take(name)
	if v == nil {
		return nil
	}
	content, isText := v.(string)
	if !isText {
		t.refuse(t.at+"."+name, "expected text or nil, got %s", packKind(v))
	}
	return &content
}

func (t *eventTaker) size(name string) Integer {
	v := t.require(name)
	number, isInteger := v.(Integer)
	if !isInteger {
		t.refuse(t.at+"."+name, "expected an integer, got %s", packKind(v))
	}
	if number.negative {
		t.refuse(t.at+"."+name, "expected a size of at least 0, got %s", number)
	}
	return number
}

func (t *eventTaker) list(v any, what, name string) []any {
	items, isList := v.([]any)
	if !isList {
		t.refuse(t.at+"."+name, "expected a list of %s, got %s", what, packKind(v))
	}
	return items
}

func (t *eventTaker) hashes(name string) []HashValue {
	items := t.list(t.require(name), "block hashes", name)
	hashes := make([]HashValue, len(items))
	for i, item := range items {
		hashes[i] = t.hash(item, name, i)
	}
	return hashes
}

func (t *eventTaker) parent(name string) *HashValue {
	v := t.require(name)
	if v == nil {
		return nil
	}
	hash := t.hash(v, name, -1)
	return &hash
}

func (t *eventTaker) hash(v any, name string, index int) HashValue {
	at := func() string {
		if index < 0 {
			return t.at + "." + name
		}
		return fmt.Sprintf("%s.%s[%d]", t.at, name, index)
	}
	var hash HashValue
	switch v := v.(type) {
	case Integer:
		hash = HashValue{number: v}
	case []byte:
		if len(v) < 8 || len(v) > 64 {
			t.refuse(at(), "expected a block hash of 8 to 64 bytes, got %d", len(v))
		}
		hash = HashValue{digest: string(v), isBytes: true}
	default:
		t.refuse(at(), "expected a block hash, an integer or bytes, got %s", packKind(v))
		return hash
	}
	kind := packKind(v)
	if t.hashKind != "" && t.hashKind != kind {
		t.refuse(at(), "got %s where the other hashes of the event are %s", kind, t.hashKind)
	}
	t.hashKind = kind
	return hash
}

func (t *eventTaker) tokens(name string) TokenIDs {
	items := t.list(t.require(name), "token ids", name)
	if len(items) > 0 {
		if _, pairs := items[0].([]any); pairs {
			return TokenIDs{Pairs: t.pairs(items, name)}
		}
	}
	return TokenIDs{Singles: t.integers(items, t.at+"."+name)}
}

func (t *eventTaker) pairs(items []any, name string) [][2]Integer {
	pairs := make([][2]Integer, len(items))
	for i, item := range items {
		pair, isList := item.([]any)
		good := isList && len(pair) == 2
		for j := 0; good && j < 2; j++ {
			pairs[i][j], good = pair[j].(Integer)
		}
		if !good {
			t.refuse(fmt.Sprintf("%s.%s[%d]", t.at, name, i), "expected a pair of token ids, got %s", packKind(item))
		}
	}
	return pairs
}

func (t *eventTaker) integers(items []any, at string) []Integer {
	numbers := make([]Integer, len(items))
	for i, item := range items {
		number, isInteger := item.(Integer)
		if !isInteger {
			t.refuse(fmt.Sprintf("%s[%d]", at, i), "expected a token id, got %s", packKind(item))
		}
		numbers[i] = number
	}
	return numbers
}

func (t *eventTaker) lookahead(name string) [][]Integer {
	v, _ := t.take(name)
	if v == nil {
		return nil
	}
	items := t.list(v, "token ids per block", name)
	blocks := make([][]Integer, len(items))
	for i, item := range items {
		at := fmt.Sprintf("%s.%s[%d]", t.at, name, i)
		tokens, isList := item.([]any)
		if !isList {
			t.refuse(at, "expected a list of token ids, got %s", packKind(item))
		}
		blocks[i] = t.integers(tokens, at)
	}
	return blocks
}

func (t *eventTaker) extraKeys(name string) [][]any {
	v, _ := t.take(name)
	if v == nil {
		return nil
	}
	items := t.list(v, "extra keys per block", name)
	blocks := make([][]any, len(items))
	for i, item := range items {
		keys, isList := item.([]any)
		if !isList && item != nil {
			t.refuse(fmt.Sprintf("%s.%s[%d]", t.at, name, i), "expected a list of keys or nil, got %s", packKind(item))
		}
		blocks[i] = keys
	}
	return blocks
}
