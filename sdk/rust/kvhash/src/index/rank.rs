//! One data parallel rank of an engine: its blocks by place and its groups' geometry.

use std::collections::BTreeMap;

use super::combine::{continue_in_tier, gcd, Combination, GroupView, Kind};
use super::layer::{Hashes, Keys, Layer, Parent, Stored};
use crate::block_hash::BlockHash;
use crate::events::{BlockRemoved, BlockStored, Event, EventBatch, HashValue, Integer, Value};
use crate::function::{HashFunction, Scratch};

/// KV cache groups that one rank may have: an engine has a handful, and a publisher that names ever new ones gets no more.
const MAX_GROUPS: usize = 64;
/// Tokens of one block at most, and hashes of one chunk, so that no number of blocks in memory reaches 2^64 tokens. An
/// event with larger blocks is refused; larger sizes in settings are taken for this one.
pub const MAX_BLOCK_TOKENS: u64 = (1 << 31) - 1;
/// How many names of unknown media are counted apart.
const MAX_NAMES: usize = 64;

/// Where blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The tier, as its place in the order in which an engine looks.
    pub tier: usize,
    /// Whether it is a REMOTE one.
    pub remote: bool,
    /// The KV cache group.
    pub group: i128,
}

impl Place {
    /// Whether it is anywhere but in the engine's own device tier.
    const fn is_below(&self) -> bool {
        self.remote || self.tier != 0
    }
}

/// A KV cache group as its events (or the settings) describe it; what is not known is 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Group {
    /// Tokens per block by tier, the largest seen: a block that is found at a hash inside it says less.
    pub sizes: Vec<u64>,
    /// The greatest common divisor of the sizes seen.
    pub smallest: u64,
    /// As published.
    pub kind: Option<String>,
    /// Tokens of its window.
    pub window: u64,
    /// Tokens of its chunks.
    pub chunk: u64,
}

impl Group {
    /// Take sizes that no block has for the largest one.
    fn bound(&mut self) {
        for size in self.sizes.iter_mut().chain([&mut self.smallest, &mut self.chunk]) {
            *size = (*size).min(MAX_BLOCK_TOKENS);
        }
    }

    fn size(&self, tier: usize) -> u64 {
        self.sizes.get(tier).copied().unwrap_or(0)
    }
}

/// The media that count, and the order of the tiers.
#[derive(Debug, Clone, Default)]
pub struct Tiers {
    media: Vec<(String, usize)>,
    count: usize,
}

impl Tiers {
    /// From (medium in upper case, tier) pairs, the device's first; tiers are numbered in the order of their first use.
    #[must_use]
    pub fn new(media: Vec<(String, usize)>) -> Self {
        let count = media.iter().map(|(_, tier)| tier + 1).max().unwrap_or(0);
        Self { media, count }
    }

    fn of(&self, medium: &str) -> Option<usize> {
        self.media.iter().find(|(name, _)| name == medium).map(|&(_, tier)| tier)
    }
}

/// What lets blocks be hashed: for events that leave blocks out.
#[derive(Clone, Copy)]
pub struct Hashing {
    /// The engine's function.
    pub function: HashFunction,
    /// Its root.
    pub none_hash: BlockHash,
    /// Tokens per hash.
    pub span: u64,
}

/// What is told of an engine; what is not told is 0 or empty.
#[derive(Clone, Default)]
pub struct RankSettings {
    /// Tokens that one hash covers.
    pub tokens_per_hash: u64,
    /// By group id.
    pub groups: Vec<(i128, Group)>,
    /// Whether hits drop their last unit for a drafter.
    pub use_eagle: bool,
    /// Hashes per chunk of the tiers below the device.
    pub offload_chunk_blocks: u64,
    /// Whether a store may be a report of reuse, and no second copy.
    pub reports_reuse: bool,
    /// The hash settings, where they are known.
    pub hashing: Option<Hashing>,
}

/// What a batch said that bears on how far the index may be trusted, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Two blocks have hashes with the same low 64 bits.
    Collision,
    /// A store may have been a report of reuse.
    ReuseReported,
    /// An event could not be read.
    Undecodable,
    /// An event of a kind that is not known was passed over.
    UnknownEvent,
    /// An event was not taken in: its group is one too many, or its blocks are too large.
    Refused,
    /// All blocks were cleared.
    Cleared,
    /// Blocks were, and the rank had stored some below the device tier: the stream does not say what became of those.
    ClearedBelow,
}

impl Signal {
    /// The name that the Python package has for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Collision => "collision",
            Self::ReuseReported => "reuse-reported",
            Self::Undecodable => "undecodable",
            Self::UnknownEvent => "unknown-event",
            Self::Refused => "refused",
            Self::Cleared => "cleared",
            Self::ClearedBelow => "cleared-below",
        }
    }
}

/// What was counted, by the names of the Python package.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub batches: u64,
    pub stored: u64,
    pub removed: u64,
    pub removed_unknown: u64,
    pub clears: u64,
    pub evicted: u64,
    pub collisions: u64,
    pub conflicts: u64,
    pub tokenless: u64,
    pub sparse_placed: u64,
    pub sparse_unplaced: u64,
    pub undecodable: u64,
    pub unknown_events: u64,
    pub refused: u64,
}

impl Counts {
    /// Name and count.
    #[must_use]
    pub const fn named(&self) -> [(&'static str, u64); 14] {
        [
            ("batches", self.batches),
            ("stored", self.stored),
            ("removed", self.removed),
            ("removed_unknown", self.removed_unknown),
            ("clears", self.clears),
            ("evicted", self.evicted),
            ("collisions", self.collisions),
            ("conflicts", self.conflicts),
            ("tokenless", self.tokenless),
            ("sparse_placed", self.sparse_placed),
            ("sparse_unplaced", self.sparse_unplaced),
            ("undecodable", self.undecodable),
            ("unknown_events", self.unknown_events),
            ("refused", self.refused),
        ]
    }
}

/// The longest prefix of a lookup's hashes that a rank holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Match {
    /// Tokens per hash; 0 where nothing says it.
    pub unit: u64,
    /// Tokens, over all tiers.
    pub tokens: u64,
    /// What a request with these hashes would not have to compute.
    pub usable_tokens: u64,
    /// Hashes found in each tier, by its number; those with none left out.
    pub by_tier: Vec<(usize, u64)>,
    /// Hashes that REMOTE placements would add, likewise.
    pub remote: Vec<(usize, u64)>,
}

/// What one rank holds.
pub struct RankMap {
    tiers: Tiers,
    settings: RankSettings,
    layers: Vec<(Place, Layer)>,
    groups: BTreeMap<i128, Group>,
    /// What was counted so far, but for the conflicts and collisions of the places that it holds.
    pub counts: Counts,
    unknown_media: Vec<(String, u64)>,
    scratch: Scratch,
    empty: Layer,
}

impl RankMap {
    /// A rank of which nothing was heard.
    #[must_use]
    pub fn new(tiers: Tiers, settings: RankSettings) -> Self {
        let mut map = Self {
            tiers,
            settings: RankSettings::default(),
            layers: Vec::new(),
            groups: BTreeMap::new(),
            counts: Counts::default(),
            unknown_media: Vec::new(),
            scratch: Scratch::default(),
            empty: Layer::default(),
        };
        map.configure(settings);
        map
    }

    /// Take settings for what comes from now on.
    pub fn configure(&mut self, settings: RankSettings) {
        let mut settings = settings;
        settings.tokens_per_hash = settings.tokens_per_hash.min(MAX_BLOCK_TOKENS);
        settings.offload_chunk_blocks = settings.offload_chunk_blocks.min(MAX_BLOCK_TOKENS);
        for (_, group) in &mut settings.groups {
            group.bound();
        }
        self.groups.extend(settings.groups.iter().cloned());
        self.settings = settings;
    }

    /// How many blocks are held, over all places.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.iter().map(|(_, layer)| layer.len()).sum()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens per hash; 0 where nothing says it.
    #[must_use]
    pub fn unit(&self) -> u64 {
        match (self.settings.tokens_per_hash, &self.settings.hashing) {
            (0, Some(hashing)) => hashing.span,
            (0, None) => self.groups.values().fold(0, |unit, group| gcd(unit, group.smallest)),
            (told, _) => told,
        }
    }

    /// The groups, by id.
    #[must_use]
    pub const fn groups(&self) -> &BTreeMap<i128, Group> {
        &self.groups
    }

    /// Say what a group is.
    pub fn set_group(&mut self, number: i128, mut group: Group) {
        group.bound();
        self.groups.insert(number, group);
    }

    /// Every place with its blocks, in the order in which they were first heard of.
    pub fn places(&self) -> impl Iterator<Item = (&Place, &Layer)> {
        self.layers.iter().map(|(place, layer)| (place, layer))
    }

    /// Media that scored nothing, and their events.
    #[must_use]
    pub fn unknown_media(&self) -> &[(String, u64)] {
        &self.unknown_media
    }

    /// The blocks of a place, made where there are none.
    pub fn layer(&mut self, place: Place) -> &mut Layer {
        let at = self.layer_at(place);
        &mut self.layers[at].1
    }

    fn layer_at(&mut self, place: Place) -> usize {
        self.find(place).unwrap_or_else(|| {
            self.layers.push((place, Layer::default()));
            self.layers.len() - 1
        })
    }

    fn find(&self, place: Place) -> Option<usize> {
        self.layers.iter().position(|(at, _)| *at == place)
    }

    // --- events -------------------------------------------------------------------------------------------------

    /// Apply a batch's events in order.
    pub fn apply(&mut self, batch: &EventBatch<'_>) -> Vec<Signal> {
        let mut signals = Vec::new();
        self.counts.batches += 1;
        for event in &batch.events {
            match event {
                Event::Stored(event) => self.store(event, &mut signals),
                Event::Removed(event) => self.remove(event),
                Event::Cleared { .. } => {
                    self.counts.clears += 1;
                    self.clear();
                    signals.push(Signal::Cleared);
                    if self.layers.iter().any(|(place, _)| place.is_below()) {
                        signals.push(Signal::ClearedBelow);
                    }
                }
                Event::Undecodable { .. } => {
                    self.counts.undecodable += 1;
                    signals.push(Signal::Undecodable);
                }
                Event::Unknown { .. } => {
                    self.counts.unknown_events += 1;
                    signals.push(Signal::UnknownEvent);
                }
            }
        }
        signals
    }

    /// Forget all blocks, of every tier and group.
    pub fn clear(&mut self) {
        for (_, layer) in &mut self.layers {
            self.counts.conflicts += layer.conflicts;
            self.counts.collisions += layer.collisions;
            *layer = Layer::default();
        }
    }

    /// Begin a new life: no blocks, no geometry but that of the settings.
    pub fn restart(&mut self) {
        self.clear();
        self.layers.clear();
        self.groups.clear();
        self.configure(self.settings.clone());
    }

    /// Drop up to `count` blocks of the fullest place: the oldest chains, from their ends. Returns how many.
    pub fn evict(&mut self, count: usize) -> usize {
        let mut fullest: Option<&mut Layer> = None;
        for (_, layer) in &mut self.layers {
            if fullest.as_ref().is_none_or(|most| layer.len() > most.len()) {
                fullest = Some(layer);
            }
        }
        let dropped = fullest.map_or(0, |layer| layer.evict(count));
        self.counts.evicted += dropped as u64;
        dropped
    }

    /// How many blocks the fullest place holds.
    #[must_use]
    pub fn fullest(&self) -> usize {
        self.layers.iter().map(|(_, layer)| layer.len()).max().unwrap_or(0)
    }

    fn tier(&mut self, medium: Option<&str>) -> Option<usize> {
        let medium = medium.unwrap_or("GPU");
        // Most are upper case already.
        if let Some(tier) = self.tiers.of(medium) {
            return Some(tier);
        }
        let name = medium.to_uppercase();
        if let Some(tier) = self.tiers.of(&name) {
            return Some(tier);
        }
        self.count_medium(&name, 1);
        None
    }

    /// Count events of a medium that scores nothing.
    pub fn count_medium(&mut self, name: &str, count: u64) {
        let known = self.unknown_media.iter().any(|(other, _)| other == name);
        let name = if known || self.unknown_media.len() < MAX_NAMES { name } else { "(other)" };
        match self.unknown_media.iter_mut().find(|(other, _)| other == name) {
            Some((_, counted)) => *counted += count,
            None => self.unknown_media.push((name.to_owned(), count)),
        }
    }

    fn store(&mut self, event: &BlockStored<'_>, signals: &mut Vec<Signal>) {
        let Some(tier) = self.tier(event.medium) else { return };
        let number = event.group_idx.map_or(0, Integer::value);
        let dense = self.is_dense(event);
        let (count, tokens) = (event.block_hashes.len(), event.token_ids.len());
        let size = if dense { (tokens / count) as u64 } else { event.block_size };
        let one_too_many = !self.groups.contains_key(&number) && self.groups.len() >= MAX_GROUPS;
        if one_too_many || size > MAX_BLOCK_TOKENS {
            self.counts.refused += 1;
            signals.push(Signal::Refused);
            return;
        }
        let window = event.kv_cache_spec_sliding_window.map_or(0, Integer::value);
        self.learn(number, tier, size, event.kv_cache_spec_kind, u64::try_from(window).unwrap_or(0));
        let at = self.layer_at(Place { tier, remote: is_remote(event.locality), group: number });
        let others: Vec<usize> = (0..self.layers.len())
            .filter(|&other| other != at && self.layers[other].0.group == number)
            .collect();
        let mut chain = Parents::of(self, event, dense);
        let last = count.wrapping_sub(1);
        let single = tier == 0 || tokens == 0;
        for (index, value) in event.block_hashes.iter().enumerate() {
            let key = value.key();
            let mut parent = chain.next(key);
            if chain.counted {
                match parent {
                    Parent::Unplaced => self.counts.sparse_unplaced += 1,
                    _ => self.counts.sparse_placed += 1,
                }
            }
            if parent == Parent::Unplaced {
                parent = self.known_parent(&others, key);
            }
            let layer = &mut self.layers[at].1;
            match layer.store(key, parent, digest_of(&value), single || index == last) {
                Stored::Collision => {
                    signals.push(Signal::Collision);
                    continue;
                }
                Stored::Again if self.settings.reports_reuse => {
                    layer.set_copies(key, 1);
                    signals.push(Signal::ReuseReported);
                }
                Stored::New | Stored::Again => {}
            }
            self.counts.stored += 1;
            if parent != Parent::Unplaced {
                for &other in &others {
                    let other = &mut self.layers[other].1;
                    if other.parent(key) == Some(Parent::Unplaced) {
                        other.place(key, parent);
                    }
                }
            }
        }
        if chain.tokenless {
            self.counts.tokenless += count as u64;
        }
    }

    fn learn(&mut self, number: i128, tier: usize, size: u64, kind: Option<&str>, window: u64) {
        let group = self.groups.entry(number).or_default();
        if size > 0 {
            if group.sizes.len() <= tier {
                group.sizes.resize(tier + 1, 0);
            }
            group.sizes[tier] = group.sizes[tier].max(size);
            group.smallest = gcd(group.smallest, size);
        }
        if let Some(kind) = kind.filter(|kind| !kind.is_empty() && group.kind.as_deref() != Some(kind)) {
            group.kind = Some(kind.to_owned());
        }
        if window > 0 {
            group.window = window;
        }
    }

    fn remove(&mut self, event: &BlockRemoved<'_>) {
        let Some(tier) = self.tier(event.medium) else { return };
        let group = event.group_idx.map_or(0, Integer::value);
        let at = self.find(Place { tier, remote: is_remote(event.locality), group });
        for value in event.block_hashes.iter() {
            let removed = at.and_then(|at| self.layers[at].1.remove(value.key(), digest_of(&value)));
            match removed {
                None => self.counts.removed_unknown += 1,
                Some(_) => self.counts.removed += 1,
            }
        }
    }

    /// Whether an event has a hash for each of its blocks of tokens. With context parallelism the event's block size can
    /// be that of one device; only the settings tell this from an event that leaves blocks out.
    fn is_dense(&self, event: &BlockStored<'_>) -> bool {
        let (count, tokens) = (event.block_hashes.len(), event.token_ids.len());
        if count == 0 || tokens == 0 || tokens % count != 0 {
            return false;
        }
        let each = (tokens / count) as u64;
        each == event.block_size || Some(each) == self.given_size(event.group_idx.map_or(0, Integer::value))
    }

    fn given_size(&self, group: i128) -> Option<u64> {
        if let Some((_, given)) = self.settings.groups.iter().find(|(number, _)| *number == group) {
            return Some(given.size(0));
        }
        if self.settings.tokens_per_hash > 0 {
            return Some(self.settings.tokens_per_hash);
        }
        self.settings.hashing.as_ref().map(|hashing| hashing.span)
    }

    /// The parent that another tier of the group knows of a block: a hash has one parent, wherever it is.
    fn known_parent(&self, layers: &[usize], key: u64) -> Parent {
        layers
            .iter()
            .filter_map(|&at| self.layers[at].1.parent(key))
            .find(|parent| *parent != Parent::Unplaced)
            .unwrap_or(Parent::Unplaced)
    }

    /// Parent of each block in an event's tokens, by hashing them; empty where that cannot be: the hash settings are not
    /// known, extra keys are about, or the parent is neither the root nor published whole.
    fn recompute(&mut self, event: &BlockStored<'_>) -> BTreeMap<u64, Parent> {
        let mut found = BTreeMap::new();
        let Some(hashing) = self.settings.hashing else { return found };
        let keyed = event.lora_name.is_some_and(|name| !name.is_empty())
            || event.lora_id.is_some_and(|id| id.value() != 0)
            || event.extra_keys.is_some_and(|keys| keys.iter().any(|key| is_truthy(&key)))
            || event.lookahead_token_ids.is_some_and(|ids| !ids.is_empty());
        let Some(mut parent) = root_of(event, &hashing) else { return found };
        if keyed || event.block_size == 0 || event.token_ids.bigram() || hashing.span == 0 {
            return found;
        }
        let tokens: Option<Vec<u64>> =
            event.token_ids.iter().map(|id| u64::try_from(id.value()).ok()).collect();
        let Some(tokens) = tokens else { return found };
        let mut before = event.parent_block_hash.map_or(Parent::Root, |parent| Parent::Key(parent.key()));
        let span = usize::try_from(hashing.span).unwrap_or(usize::MAX);
        for (index, block) in tokens.chunks_exact(span).enumerate() {
            parent = hashing.function.keyed_block(&mut self.scratch, &parent, block, None);
            if ((index as u64 + 1) * hashing.span).is_multiple_of(event.block_size) {
                let key = parent.low64();
                found.insert(key, before);
                before = Parent::Key(key);
            }
        }
        found
    }

    // --- lookups ------------------------------------------------------------------------------------------------

    /// How far this rank's blocks carry a request with these hashes. `num_tokens`: of the prompt, so that a hit leaves its
    /// last token to compute. `hint`: hashes that another rank was found to hold; any value gives the same answer.
    #[must_use]
    pub fn longest_prefix(&self, hashes: &dyn Hashes, num_tokens: Option<u64>, hint: usize) -> Match {
        let unit = self.unit();
        if unit == 0 || hashes.is_empty() {
            return Match::default();
        }
        let total = hashes.len() as u64 * unit;
        let limit = num_tokens.map_or(total, |tokens| total.min(tokens.saturating_sub(1)));
        if let Some((layer, size)) = self.single(unit) {
            return single_match(layer, (unit, size, limit), hashes, hint);
        }
        let device = self.views(hashes, unit, 0, false, hint);
        let combined = Combination::new(&device, unit);
        let lower: Vec<_> = (1..self.tiers.count)
            .map(|tier| (tier, self.views(hashes, unit, tier, false, hint)))
            .filter(|(_, views)| !views.is_empty())
            .collect();
        let chunks = self.settings.offload_chunk_blocks;
        let go_on = |views: &[GroupView<'_>], start: u64, limit: u64| {
            if views.is_empty() || start >= limit {
                return start;
            }
            continue_in_tier(views, start, limit, chunks)
        };
        let mut found = Match { unit, ..Match::default() };
        let mut length = combined.longest(total, false);
        if length >= unit {
            found.by_tier.push((0, length / unit));
        }
        for (tier, views) in &lower {
            let end = go_on(views, length, total);
            if end - length >= unit {
                found.by_tier.push((*tier, (end - length) / unit));
            }
            length = end;
        }
        if self.layers.iter().any(|(place, _)| place.remote) {
            for tier in 0..self.tiers.count {
                let end = go_on(&self.views(hashes, unit, tier, true, 0), length, total);
                if end > length {
                    found.remote.push((tier, (end - length) / unit));
                }
            }
        }
        found.tokens = length;
        found.usable_tokens = length;
        if self.settings.use_eagle || length > limit {
            let mut usable = combined.longest(limit, self.settings.use_eagle);
            for (_, views) in &lower {
                usable = go_on(views, usable, limit);
            }
            found.usable_tokens = usable;
        }
        found
    }

    /// The blocks and their size where all there is is one full-attention group on the device, as most engines have it.
    fn single(&self, unit: u64) -> Option<(&Layer, u64)> {
        let [(place, layer)] = &self.layers[..] else { return None };
        let group = self.groups.get(&place.group)?;
        let full = Kind::of(group.kind.as_deref(), group.window, group.chunk) == Kind::Full;
        let alone = self.groups.len() == 1 && (place.tier, place.remote) == (0, false);
        let size = if group.size(0) > 0 { group.size(0) } else { unit };
        (alone && full && !self.settings.use_eagle && size % unit == 0).then_some((layer, size))
    }

    /// Read what lookups of these keys will, so that the memory of many ranks is fetched at once.
    #[must_use]
    pub fn touch(&self, keys: &[u64]) -> usize {
        let geometry = self.groups.first_key_value().map_or(0, |(_, group)| group.size(0) as usize);
        let held =
            self.layers.first().map_or(0, |(_, layer)| keys.iter().filter(|&&key| layer.touch(key)).count());
        geometry + held
    }

    /// The groups of a tier, those of one geometry together; none where one has no whole number of hashes.
    fn views<'a>(
        &'a self,
        hashes: &'a dyn Hashes,
        unit: u64,
        tier: usize,
        remote: bool,
        hint: usize,
    ) -> Vec<GroupView<'a>> {
        let mut numbers: Vec<(i128, &Layer)> = self
            .layers
            .iter()
            .filter(|(place, _)| (place.tier, place.remote) == (tier, remote))
            .map(|(place, layer)| (place.group, layer))
            .collect();
        if tier == 0 && !remote {
            for (number, _) in &self.settings.groups {
                if !numbers.iter().any(|(known, _)| known == number) {
                    numbers.push((*number, &self.empty));
                }
            }
        }
        numbers.sort_by_key(|(number, _)| *number);
        let mut views: Vec<GroupView<'a>> = Vec::with_capacity(1);
        for (number, layer) in numbers {
            let Some(group) = self.groups.get(&number) else { continue };
            let kind = Kind::of(group.kind.as_deref(), group.window, group.chunk);
            let size =
                [group.size(tier), group.size(0), unit].into_iter().find(|&size| size > 0).unwrap_or(unit);
            if size % unit != 0 {
                return Vec::new();
            }
            let geometry = (kind, size, group.window, group.chunk);
            match views.iter_mut().find(|view| view.geometry() == geometry) {
                Some(view) => view.layers.push(layer),
                None => {
                    let mut view = GroupView::new(geometry, hashes, unit, hint);
                    view.layers.push(layer);
                    views.push(view);
                }
            }
        }
        views
    }
}

/// What `RankMap::longest_prefix` says where one full-attention group on the device is all there is.
fn single_match(
    layer: &Layer,
    (unit, size, limit): (u64, u64, u64),
    hashes: &dyn Hashes,
    hint: usize,
) -> Match {
    let factor = usize::try_from(size / unit).unwrap_or(usize::MAX);
    let blocks = layer.run(&Keys::new(hashes, factor), 0, hint / factor) as u64;
    let tokens = blocks * size;
    let by_tier = if blocks > 0 { vec![(0, tokens / unit)] } else { Vec::new() };
    Match { unit, tokens, usable_tokens: blocks.min(limit / size) * size, by_tier, remote: Vec::new() }
}

/// The parents of an event's blocks, one after the other.
struct Parents {
    first: Parent,
    before: Option<Parent>,
    found: Option<BTreeMap<u64, Parent>>,
    tokenless: bool,
    counted: bool,
}

impl Parents {
    fn of(map: &mut RankMap, event: &BlockStored<'_>, dense: bool) -> Self {
        let first = event.parent_block_hash.map_or(Parent::Root, |parent| Parent::Key(parent.key()));
        let tokenless = event.token_ids.is_empty();
        let found = (!tokenless && !dense).then(|| map.recompute(event));
        Self { first, before: None, counted: found.is_some(), found, tokenless }
    }

    fn next(&mut self, key: u64) -> Parent {
        if let Some(found) = &self.found {
            return found.get(&key).copied().unwrap_or(Parent::Unplaced);
        }
        let first = self.before.is_none();
        let before = self.before.replace(Parent::Key(key)).unwrap_or(self.first);
        if !self.tokenless {
            return before;
        }
        // Without tokens "no parent" means that it is not said; and further hashes need not follow each other.
        if first && self.first != Parent::Root {
            self.first
        } else {
            Parent::Unplaced
        }
    }
}

fn root_of(event: &BlockStored<'_>, hashing: &Hashing) -> Option<BlockHash> {
    let Some(published) = event.parent_block_hash else { return Some(hashing.none_hash) };
    let HashValue::Bytes(bytes) = published else { return None };
    hashing.function.digest_of(bytes)
}

fn digest_of<'a>(value: &HashValue<'a>) -> Option<&'a [u8]> {
    match value {
        HashValue::Bytes(bytes) if bytes.len() > 8 => Some(bytes),
        _ => None,
    }
}

/// Whether a value counts as true in Python: an entry of extra keys that is there and not empty.
fn is_truthy(value: &Value<'_>) -> bool {
    match value {
        Value::Nil => false,
        Value::Bool(value) => *value,
        Value::Int(number) => number.value() != 0,
        Value::Float(number) => *number != 0.0,
        Value::Text(text) => !text.is_empty(),
        Value::Bytes(bytes) => !bytes.is_empty(),
        Value::List(items) => !items.is_empty(),
        Value::Map(pairs) => !pairs.is_empty(),
        Value::Extension(..) => true,
    }
}

fn is_remote(locality: Option<&str>) -> bool {
    locality.is_some_and(|locality| locality.to_uppercase() == "REMOTE")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::decode_batch;

    /// A msgpack integer of 64 bits.
    fn wide(value: u64) -> Vec<u8> {
        [&[0xcf][..], &value.to_be_bytes()].concat()
    }

    /// A batch of one store without tokens: `count` hashes from 1, a block size.
    fn stored(count: u8, block_size: u64) -> Vec<u8> {
        let hashes: Vec<u8> = (1..=count).collect();
        let (head, name) = ([0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x95, 0xab], b"BlockStored");
        [&head[..], name, &[0x90 | count], &hashes, &[0xc0, 0x90], &wide(block_size), &[0xc0]].concat()
    }

    fn applied(map: &mut RankMap, payload: &[u8]) -> Vec<Signal> {
        map.apply(&decode_batch(payload).expect("a batch"))
    }

    /// No size, told or published, makes a length overflow: larger ones than blocks have are bounded or refused.
    #[test]
    fn sizes_that_no_block_has_overflow_nothing() {
        let tiers = || Tiers::new(vec![("GPU".to_owned(), 0), ("CPU".to_owned(), 1)]);
        for kind in [None, Some("sliding_window"), Some("mamba"), Some("chunked_local_attention")] {
            let group = Group {
                sizes: vec![u64::MAX],
                smallest: u64::MAX,
                kind: kind.map(str::to_owned),
                window: u64::MAX,
                chunk: u64::MAX,
            };
            let settings = RankSettings {
                tokens_per_hash: u64::MAX,
                groups: vec![(0, group.clone()), (1, group)],
                use_eagle: true,
                offload_chunk_blocks: u64::MAX,
                ..RankSettings::default()
            };
            let mut map = RankMap::new(tiers(), settings);
            assert_eq!(map.unit(), MAX_BLOCK_TOKENS);
            assert_eq!(applied(&mut map, &stored(9, MAX_BLOCK_TOKENS + 1)), [Signal::Refused]);
            assert_eq!(applied(&mut map, &stored(9, u64::MAX)), [Signal::Refused]);
            assert_eq!((map.len(), map.counts.refused), (0, 2));
            assert_eq!(applied(&mut map, &stored(9, MAX_BLOCK_TOKENS)), []);
            let hashes: Vec<u64> = (1..=12).collect();
            for num_tokens in [None, Some(0), Some(u64::MAX)] {
                assert!(map.longest_prefix(&hashes, num_tokens, 0).tokens <= 12 * MAX_BLOCK_TOKENS);
            }
        }
        let mut map = RankMap::new(tiers(), RankSettings::default());
        applied(&mut map, &stored(9, MAX_BLOCK_TOKENS));
        let hashes: Vec<u64> = (1..=12).collect();
        assert_eq!(map.longest_prefix(&hashes, None, 0).tokens, 9 * MAX_BLOCK_TOKENS);
    }
}
