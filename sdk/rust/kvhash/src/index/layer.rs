//! One place's blocks: those that one rank holds of one KV cache group in one tier, linked as a forest of prefixes.
//!
//! A block is known by its key, the low 64 bits of its hash. It is *reachable* when every block from the root to it is
//! held; its depth is then its distance from the root, 1 for a first block. The reachable blocks are closed under
//! prefixes, so a lookup searches for the last of its hashes that is reachable at the right depth. All other blocks
//! have depth 0 and are found one by one.
//!
//! Blocks lie in chunks that never move, named by slots of 32 bits; the links between them are slots too. That keeps a
//! block at 48 bytes beside its entry in the table.

use std::collections::{HashMap, HashSet};

use hashbrown::HashTable;

/// Where a block hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// It is a prompt's first block.
    Root,
    /// Not known.
    Unplaced,
    /// The block with this key.
    Key(u64),
}

/// What became of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The block was not held before.
    New,
    /// One more copy of a block that is held.
    Again,
    /// Another block has its key; it was not taken in.
    Collision,
}

/// A lookup's hashes, read when a search asks for them.
pub trait Hashes {
    /// How many there are.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The low 64 bits of the hash at a place.
    fn key(&self, index: usize) -> u64;
    /// Whether the hash at a place is known whole (more than 8 bytes), is as long as `digest`, and another.
    fn differs(&self, index: usize, digest: &[u8]) -> bool;
}

/// A lookup's blocks of one size: the hash of each is that of its last unit.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    hashes: &'a dyn Hashes,
    factor: usize,
    /// How many blocks there are.
    pub count: usize,
}

impl<'a> Keys<'a> {
    /// The blocks of `factor` hashes each.
    pub fn new(hashes: &'a dyn Hashes, factor: usize) -> Self {
        Self { hashes, factor, count: hashes.len().checked_div(factor).unwrap_or(0) }
    }

    #[inline]
    fn place(&self, index: usize) -> usize {
        (index + 1) * self.factor - 1
    }
}

const NONE: u32 = u32::MAX;
const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

const ROOT: u8 = 1;
const UNPLACED: u8 = 2;
const ENDS_CHUNK: u8 = 4;
const HAS_DIGEST: u8 = 8;

#[derive(Clone)]
struct Block {
    key: u64,
    /// The parent's key, unless the flags say otherwise.
    parent: u64,
    copies: u32,
    depth: u32,
    first_child: u32,
    /// Siblings in the order in which they were linked: the children of one held parent, or those that wait for the same
    /// one. The first one's `previous` is the last one. A free slot's `next` is the next free one.
    next: u32,
    previous: u32,
    /// In the order in which blocks came.
    newer: u32,
    older: u32,
    flags: u8,
}

impl Block {
    fn parent(&self) -> Parent {
        match self.flags & (ROOT | UNPLACED) {
            0 => Parent::Key(self.parent),
            ROOT => Parent::Root,
            _ => Parent::Unplaced,
        }
    }

    fn set_parent(&mut self, parent: Parent) {
        self.flags &= !(ROOT | UNPLACED);
        match parent {
            Parent::Root => self.flags |= ROOT,
            Parent::Unplaced => self.flags |= UNPLACED,
            Parent::Key(key) => self.parent = key,
        }
    }
}

/// One held block, as a snapshot keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The low 64 bits of its hash.
    pub key: u64,
    /// Stores minus removals.
    pub copies: u32,
    /// Where it hangs.
    pub parent: Parent,
    /// Its whole hash, where that was published.
    pub digest: Option<Box<[u8]>>,
    /// Whether what was stored with it may be retrieved up to here.
    pub ends_chunk: bool,
    /// Its distance from the root; 0 where it is not reachable.
    pub depth: u32,
}

/// The blocks of one place.
#[derive(Default)]
pub struct Layer {
    chunks: Vec<Vec<Block>>,
    free: Option<u32>,
    table: HashTable<u32>,
    /// Parent that is not held -> the first of the held blocks that wait for it.
    waiting: HashMap<u64, u32>,
    digests: HashMap<u32, Box<[u8]>>,
    ends: Option<(u32, u32)>,
    /// How many blocks are reachable from the root.
    pub reachable: u64,
    /// Parents that contradicted another or made no sense.
    pub conflicts: u64,
    /// Blocks that were not taken in, since another one had their key.
    pub collisions: u64,
}

/// Keys are parts of digests, and spread well; the product spreads those that are not.
#[inline]
fn spread(key: u64) -> u64 {
    let product = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
    (product >> 64) as u64 ^ product as u64
}

impl Layer {
    /// How many blocks are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Bytes of memory in use, but for whole digests.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<Block>()
            + self.table.allocation_size()
            + self.waiting.capacity() * size_of::<(u64, u32)>()
    }

    #[inline]
    fn at(&self, slot: u32) -> &Block {
        &self.chunks[(slot >> CHUNK_BITS) as usize][slot as usize & (CHUNK - 1)]
    }

    #[inline]
    fn at_mut(&mut self, slot: u32) -> &mut Block {
        &mut self.chunks[(slot >> CHUNK_BITS) as usize][slot as usize & (CHUNK - 1)]
    }

    #[inline]
    fn find(&self, key: u64) -> Option<u32> {
        self.table.find(spread(key), |&slot| self.at(slot).key == key).copied()
    }

    // --- changes ------------------------------------------------------------------------------------------------

    /// Add one copy of a block. A parent that contradicts the one known, or is the block itself, makes it unplaced.
    pub fn store(&mut self, key: u64, parent: Parent, digest: Option<&[u8]>, ends_chunk: bool) -> Stored {
        let mut parent = parent;
        if parent == Parent::Key(key) {
            self.conflicts += 1;
            parent = Parent::Unplaced;
        }
        let Some(slot) = self.find(key) else {
            let slot = self.insert(key, parent, ends_chunk);
            if let Some(digest) = digest {
                self.keep_digest(slot, digest);
            }
            let children = self.waiting.remove(&key).unwrap_or(NONE);
            self.at_mut(slot).first_child = children;
            self.attach(slot);
            return Stored::New;
        };
        if let (Some(digest), Some(known)) = (digest, self.digest(slot)) {
            if digest != known {
                self.collisions += 1;
                return Stored::Collision;
            }
        }
        let block = self.at_mut(slot);
        block.copies = block.copies.saturating_add(1);
        if ends_chunk {
            block.flags |= ENDS_CHUNK;
        }
        if let Some(digest) = digest {
            self.keep_digest(slot, digest);
        }
        if parent != Parent::Unplaced {
            self.place_slot(slot, parent);
        }
        Stored::Again
    }

    /// Say how many copies of a held block there are.
    pub fn set_copies(&mut self, key: u64, copies: u32) {
        if let Some(slot) = self.find(key) {
            self.at_mut(slot).copies = copies;
        }
    }

    /// The parent of a held block; `None` where it is not held.
    #[must_use]
    pub fn parent(&self, key: u64) -> Option<Parent> {
        self.find(key).map(|slot| self.at(slot).parent())
    }

    /// Say which parent a held block has.
    pub fn place(&mut self, key: u64, parent: Parent) {
        if let Some(slot) = self.find(key) {
            self.place_slot(slot, parent);
        }
    }

    fn place_slot(&mut self, slot: u32, parent: Parent) {
        let block = self.at(slot);
        let (key, known) = (block.key, block.parent());
        if known == parent {
            return;
        }
        self.detach(slot);
        let sound = known == Parent::Unplaced && parent != Parent::Key(key);
        if !sound {
            self.conflicts += 1;
        }
        self.at_mut(slot).set_parent(if sound { parent } else { Parent::Unplaced });
        self.attach(slot);
    }

    /// Take one copy of a block away; says whether it was the last, `None` where no such block is held.
    pub fn remove(&mut self, key: u64, digest: Option<&[u8]>) -> Option<bool> {
        let slot = self.find(key)?;
        if let (Some(digest), Some(known)) = (digest, self.digest(slot)) {
            if digest != known {
                return None;
            }
        }
        let block = self.at_mut(slot);
        if block.copies > 1 {
            block.copies -= 1;
            return Some(false);
        }
        self.drop_slot(slot);
        Some(true)
    }

    /// Forget up to `count` blocks, leaves first: those of the chains that began longest ago. Returns how many.
    ///
    /// From the block held longest down by the first of each one's children; what is dropped there lets the next of its
    /// siblings be followed, and its parent be dropped after the last of them. So what others hang on stays.
    pub fn evict(&mut self, count: usize) -> usize {
        let (mut path, mut below) = (Vec::new(), HashSet::new());
        let mut dropped = 0;
        while dropped < count {
            if path.is_empty() {
                let Some((oldest, _)) = self.ends else { break };
                path.push(oldest);
                below = HashSet::from([oldest]);
            }
            let mut last = path[path.len() - 1];
            loop {
                let child = self.at(last).first_child;
                // A circle of parents is nobody's prefix: it ends where it began.
                if child == NONE || !below.insert(child) {
                    break;
                }
                path.push(child);
                last = child;
            }
            path.pop();
            self.drop_slot(last);
            dropped += 1;
        }
        dropped
    }

    fn insert(&mut self, key: u64, parent: Parent, ends_chunk: bool) -> u32 {
        let mut block = Block {
            key,
            parent: 0,
            copies: 1,
            depth: 0,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            newer: NONE,
            older: self.ends.map_or(NONE, |(_, newest)| newest),
            flags: if ends_chunk { ENDS_CHUNK } else { 0 },
        };
        block.set_parent(parent);
        let slot = match self.free {
            Some(slot) => {
                let next = self.at(slot).next;
                self.free = (next != NONE).then_some(next);
                *self.at_mut(slot) = block;
                slot
            }
            None => {
                if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
                    // The first chunk grows as it fills, so that many small places stay small.
                    let room = if self.chunks.is_empty() { 0 } else { CHUNK };
                    self.chunks.push(Vec::with_capacity(room));
                }
                let number = self.chunks.len() - 1;
                let chunk = &mut self.chunks[number];
                chunk.push(block);
                let slot = number * CHUNK + chunk.len() - 1;
                u32::try_from(slot)
                    .ok()
                    .filter(|&slot| slot != NONE)
                    .expect("fewer than 2^32 blocks in one place")
            }
        };
        match &mut self.ends {
            Some((_, newest)) => {
                let before = std::mem::replace(newest, slot);
                self.at_mut(before).newer = slot;
            }
            None => self.ends = Some((slot, slot)),
        }
        let Self { table, chunks, .. } = self;
        table.insert_unique(spread(key), slot, |&slot| {
            spread(chunks[(slot >> CHUNK_BITS) as usize][slot as usize & (CHUNK - 1)].key)
        });
        slot
    }

    /// Forget a held block, all its copies. What hangs on it becomes unreachable and waits for it.
    fn drop_slot(&mut self, slot: u32) {
        self.detach(slot);
        let Block { key, first_child, newer, older, .. } = *self.at(slot);
        if let Ok(entry) = self.table.find_entry(spread(key), |&other| other == slot) {
            entry.remove();
        }
        if first_child != NONE {
            self.waiting.insert(key, first_child);
        }
        self.digests.remove(&slot);
        if newer != NONE {
            self.at_mut(newer).older = older;
        }
        if older != NONE {
            self.at_mut(older).newer = newer;
        }
        let (oldest, newest) = self.ends.expect("a held block");
        let oldest = if oldest == slot { newer } else { oldest };
        let newest = if newest == slot { older } else { newest };
        self.ends = (oldest != NONE).then_some((oldest, newest));
        let free = self.free.replace(slot).unwrap_or(NONE);
        self.at_mut(slot).next = free;
    }

    fn attach(&mut self, slot: u32) {
        let block = self.at(slot);
        match block.parent() {
            Parent::Root => self.reach(slot, 1),
            Parent::Unplaced => {}
            Parent::Key(key) => {
                let Some(parent) = self.find(key) else {
                    let head = *self.waiting.entry(key).or_insert(slot);
                    self.link(slot, head);
                    return;
                };
                let Block { first_child, depth, .. } = *self.at(parent);
                if first_child == NONE {
                    self.at_mut(parent).first_child = slot;
                    self.link(slot, slot);
                } else {
                    self.link(slot, first_child);
                }
                if depth > 0 {
                    self.reach(slot, depth + 1);
                }
            }
        }
    }

    /// Put a block behind the last of its siblings; `head`: the first of them, the block itself where it is alone.
    fn link(&mut self, slot: u32, head: u32) {
        let tail = if head == slot { slot } else { self.at(head).previous };
        if head != slot {
            self.at_mut(tail).next = slot;
            self.at_mut(head).previous = slot;
        }
        let block = self.at_mut(slot);
        (block.next, block.previous) = (NONE, tail);
    }

    fn detach(&mut self, slot: u32) {
        if self.at(slot).depth > 0 {
            self.reach(slot, 0);
        }
        let block = self.at(slot);
        let Parent::Key(key) = block.parent() else { return };
        let (next, previous) = (block.next, block.previous);
        let first = self.at(previous).next == NONE;
        if !first {
            self.at_mut(previous).next = next;
        }
        if next != NONE {
            self.at_mut(next).previous = previous;
        }
        // The first one is named by the parent, or by who waits; it has to know when the last one goes.
        if first || next == NONE {
            match self.find(key) {
                Some(parent) if first => self.at_mut(parent).first_child = next,
                Some(parent) => {
                    let head = self.at(parent).first_child;
                    self.at_mut(head).previous = previous;
                }
                None if !first => {
                    let head = self.waiting[&key];
                    self.at_mut(head).previous = previous;
                }
                None if next != NONE => {
                    self.waiting.insert(key, next);
                }
                None => {
                    self.waiting.remove(&key);
                }
            }
        }
        let block = self.at_mut(slot);
        (block.next, block.previous) = (NONE, NONE);
    }

    /// Give a block its depth, and all that hangs on it theirs; 0 makes them unreachable.
    fn reach(&mut self, slot: u32, depth: u32) {
        // A block without children, the common one, needs no list.
        if self.at(slot).first_child == NONE {
            self.set_depth(slot, depth);
            return;
        }
        let mut todo = vec![(slot, depth)];
        while let Some((slot, depth)) = todo.pop() {
            self.set_depth(slot, depth);
            let below = if depth > 0 { depth + 1 } else { 0 };
            let mut child = self.at(slot).first_child;
            while child != NONE {
                todo.push((child, below));
                child = self.at(child).next;
            }
        }
    }

    fn set_depth(&mut self, slot: u32, depth: u32) {
        let block = self.at_mut(slot);
        let before = std::mem::replace(&mut block.depth, depth);
        self.reachable += u64::from(depth > 0);
        self.reachable -= u64::from(before > 0);
    }

    fn keep_digest(&mut self, slot: u32, digest: &[u8]) {
        if self.at(slot).flags & HAS_DIGEST == 0 {
            self.at_mut(slot).flags |= HAS_DIGEST;
            self.digests.insert(slot, digest.into());
        }
    }

    fn digest(&self, slot: u32) -> Option<&[u8]> {
        if self.at(slot).flags & HAS_DIGEST == 0 {
            return None;
        }
        self.digests.get(&slot).map(AsRef::as_ref)
    }

    // --- lookups ------------------------------------------------------------------------------------------------

    /// Read what a lookup of this key will: says whether it is held. Many layers' memory is fetched at once that way.
    #[inline]
    #[must_use]
    pub fn touch(&self, key: u64) -> bool {
        self.find(key).is_some()
    }

    #[inline]
    fn block(&self, keys: &Keys<'_>, index: usize) -> Option<&Block> {
        let place = keys.place(index);
        let slot = self.find(keys.hashes.key(place))?;
        let block = self.at(slot);
        if block.flags & HAS_DIGEST != 0
            && self.digest(slot).is_some_and(|known| keys.hashes.differs(place, known))
        {
            return None;
        }
        Some(block)
    }

    /// Whether the block at a place is held.
    #[must_use]
    pub fn holds(&self, keys: &Keys<'_>, index: usize) -> bool {
        self.block(keys, index).is_some()
    }

    /// The place after the last of the held blocks that follow each other from `start`. `hint`: where the reachable
    /// run may end, from another lookup of the same prompt; any value gives the same answer.
    #[must_use]
    pub fn run(&self, keys: &Keys<'_>, start: usize, hint: usize) -> usize {
        let mut end = start.max(self.reachable_run(keys, hint));
        while end < keys.count && self.holds(keys, end) {
            end += 1;
        }
        end
    }

    fn reachable_run(&self, keys: &Keys<'_>, hint: usize) -> usize {
        let reached =
            |count: usize| self.block(keys, count - 1).is_some_and(|block| block.depth as usize == count);
        if self.reachable == 0 || keys.count == 0 {
            return 0;
        }
        let hint = hint.min(keys.count);
        let (mut good, mut bad) = (0, keys.count + 1);
        if hint > 1 {
            if reached(hint) {
                good = hint;
            } else {
                bad = hint;
            }
        }
        if good == 0 {
            if !reached(1) {
                return 0;
            }
            good = 1;
        }
        let mut step = 1;
        while good + step < bad {
            if reached(good + step) {
                good += step;
                step *= 2;
            } else {
                bad = good + step;
            }
        }
        while bad - good > 1 {
            let middle = good.midpoint(bad);
            if reached(middle) {
                good = middle;
            } else {
                bad = middle;
            }
        }
        good
    }

    /// The last place of `start` to `end` at which a chunk ends; `start` where none does.
    #[must_use]
    pub fn chunk_end(&self, keys: &Keys<'_>, start: usize, end: usize) -> usize {
        let mut end = end;
        while end > start {
            let slot = self.find(keys.hashes.key(keys.place(end - 1)));
            if slot.is_some_and(|slot| self.at(slot).flags & ENDS_CHUNK != 0) {
                break;
            }
            end -= 1;
        }
        end
    }

    // --- the whole of it ----------------------------------------------------------------------------------------

    /// Every block, the one held longest first.
    pub fn iter(&self) -> impl Iterator<Item = Held> + '_ {
        let mut next = self.ends.map(|(oldest, _)| oldest);
        std::iter::from_fn(move || {
            let slot = next?;
            let block = self.at(slot);
            next = (block.newer != NONE).then_some(block.newer);
            Some(Held {
                key: block.key,
                copies: block.copies,
                parent: block.parent(),
                digest: self.digest(slot).map(Into::into),
                ends_chunk: block.flags & ENDS_CHUNK != 0,
                depth: block.depth,
            })
        })
    }

    /// For each first block: its key, the key and depth of the last block up to where its prompts go together, and how
    /// many blocks hang on it, itself included.
    #[must_use]
    pub fn beginnings(&self) -> Vec<(u64, u64, u32, u64)> {
        let mut found = Vec::new();
        let mut next = self.ends.map_or(NONE, |(oldest, _)| oldest);
        while next != NONE {
            let slot = next;
            next = self.at(slot).newer;
            if self.at(slot).depth != 1 {
                continue;
            }
            let mut end = slot;
            loop {
                let child = self.at(end).first_child;
                if child == NONE || self.at(child).next != NONE {
                    break;
                }
                end = child;
            }
            let (mut below, mut todo) = (0, vec![slot]);
            while let Some(slot) = todo.pop() {
                below += 1;
                let mut child = self.at(slot).first_child;
                while child != NONE {
                    todo.push(child);
                    child = self.at(child).next;
                }
            }
            found.push((self.at(slot).key, self.at(end).key, self.at(end).depth, below));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Hashes for Vec<u64> {
        fn len(&self) -> usize {
            self.as_slice().len()
        }
        fn key(&self, index: usize) -> u64 {
            self[index]
        }
        fn differs(&self, _: usize, _: &[u8]) -> bool {
            false
        }
    }

    /// A small generator, so that a failure comes again.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    /// Blocks 1..=200; the parent of block n is n / 2, and 0 stands for the root.
    fn parent_of(key: u64) -> Parent {
        if key / 2 == 0 {
            Parent::Root
        } else {
            Parent::Key(key / 2)
        }
    }

    fn path_to(key: u64) -> Vec<u64> {
        let mut path: Vec<u64> =
            std::iter::successors(Some(key), |key| Some(key / 2)).take_while(|&k| k > 0).collect();
        path.reverse();
        path
    }

    /// After any order of stores, removals and late placements, copies, depths, links and runs are those of a plain map.
    #[test]
    fn random_changes_leave_what_a_plain_map_has() {
        for seed in 1..60 {
            let mut random = Random(seed);
            let mut layer = Layer::default();
            let mut copies: HashMap<u64, u32> = HashMap::new();
            let mut placed: HashSet<u64> = HashSet::new();
            for _ in 0..400 {
                let key = random.below(200) + 1;
                match random.below(4) {
                    0 | 1 => {
                        let known = random.below(5) > 0;
                        layer.store(key, if known { parent_of(key) } else { Parent::Unplaced }, None, true);
                        *copies.entry(key).or_default() += 1;
                        if known {
                            placed.insert(key);
                        }
                    }
                    2 => {
                        let left = copies.get(&key).copied().unwrap_or(0);
                        let expected = if left == 0 { None } else { Some(left == 1) };
                        assert_eq!(layer.remove(key, None), expected);
                        if left > 1 {
                            copies.insert(key, left - 1);
                        } else {
                            copies.remove(&key);
                            placed.remove(&key);
                        }
                    }
                    _ => {
                        layer.place(key, parent_of(key));
                        if copies.contains_key(&key) {
                            placed.insert(key);
                        }
                    }
                }
                check(&layer, &copies, &placed, random.below(300) as usize);
            }
            assert_eq!(layer.conflicts, 0);
            while !layer.is_empty() {
                let before = layer.len();
                assert_eq!(layer.evict(7), before.min(7));
                let left: HashSet<u64> = layer.iter().map(|block| block.key).collect();
                copies.retain(|key, _| left.contains(key));
                placed.retain(|key| left.contains(key));
                check(&layer, &copies, &placed, 3);
            }
            assert!(layer.waiting.is_empty());
        }
    }

    fn check(layer: &Layer, copies: &HashMap<u64, u32>, placed: &HashSet<u64>, hint: usize) {
        assert_eq!(layer.len(), copies.len());
        let mut reachable = 0;
        for block in layer.iter() {
            assert_eq!(block.copies, copies[&block.key]);
            let path = path_to(block.key);
            let whole = path.iter().all(|key| placed.contains(key));
            assert_eq!(block.depth as usize, if whole { path.len() } else { 0 });
            reachable += u64::from(whole);
        }
        assert_eq!(layer.reachable, reachable);
        for end in [150, 177, 200, 129] {
            let path = path_to(end);
            let keys = Keys::new(&path, 1);
            let held = path.iter().take_while(|key| copies.contains_key(key)).count();
            assert_eq!(layer.run(&keys, 0, hint), held);
        }
    }

    /// A parent that contradicts the one known, or is the block itself, leaves the block unplaced, and is counted.
    #[test]
    fn contradictions_are_counted() {
        let mut layer = Layer::default();
        layer.store(5, Parent::Key(5), None, true);
        layer.store(6, Parent::Root, None, true);
        layer.store(6, Parent::Key(5), None, true);
        assert_eq!((layer.conflicts, layer.reachable), (2, 0));
        assert_eq!((layer.parent(5), layer.parent(6)), (Some(Parent::Unplaced), Some(Parent::Unplaced)));
    }

    /// A circle of parents is nobody's prefix, and can be taken away again.
    #[test]
    fn a_circle_is_not_reachable_and_goes() {
        let mut layer = Layer::default();
        for key in 1..=3 {
            layer.store(key, Parent::Key(key % 3 + 1), None, true);
        }
        assert_eq!(layer.reachable, 0);
        assert_eq!(layer.evict(10), 3);
        assert!(layer.waiting.is_empty() || layer.is_empty());
    }

    /// What several chains share outlives them: the one that began first goes first, from its end.
    #[test]
    fn what_others_hang_on_is_dropped_last() {
        let mut layer = Layer::default();
        layer.store(1, Parent::Root, None, true);
        layer.store(2, Parent::Key(1), None, true);
        for (first, last) in [(10, 13), (20, 23), (30, 33)] {
            layer.store(first, Parent::Key(2), None, true);
            for key in first + 1..=last {
                layer.store(key, Parent::Key(key - 1), None, true);
            }
        }
        let mut gone = Vec::new();
        while !layer.is_empty() {
            let before: HashSet<u64> = layer.iter().map(|block| block.key).collect();
            assert_eq!(layer.evict(1), 1);
            let after: HashSet<u64> = layer.iter().map(|block| block.key).collect();
            gone.extend(before.difference(&after).copied());
            assert_eq!(layer.reachable as usize, layer.len());
        }
        assert_eq!(gone, [13, 12, 11, 10, 23, 22, 21, 20, 33, 32, 31, 30, 2, 1]);
        assert!(layer.waiting.is_empty());
    }

    /// Siblings leave in any order, from the middle and from either end, held parent or not; the others stay linked.
    #[test]
    fn siblings_stay_linked() {
        for seed in 1..200 {
            let mut random = Random(seed);
            let mut layer = Layer::default();
            let mut linked: Vec<u64> = Vec::new();
            let mut parent_is_held = false;
            for _ in 0..60 {
                match random.below(5) {
                    0 => {
                        if parent_is_held {
                            layer.remove(1, None);
                        } else {
                            layer.store(1, Parent::Root, None, true);
                        }
                        parent_is_held = !parent_is_held;
                    }
                    1 | 2 if !linked.is_empty() => {
                        let key = linked.remove(random.below(linked.len() as u64) as usize);
                        layer.remove(key, None);
                    }
                    _ => {
                        let key = random.below(1 << 40) + 2;
                        if !linked.contains(&key) {
                            layer.store(key, Parent::Key(1), None, true);
                            linked.push(key);
                        }
                    }
                }
                let mut slot = match layer.find(1) {
                    Some(parent) => layer.at(parent).first_child,
                    None => layer.waiting.get(&1).copied().unwrap_or(NONE),
                };
                let (first, mut last, mut seen) = (slot, slot, Vec::new());
                while slot != NONE {
                    seen.push(layer.at(slot).key);
                    last = slot;
                    slot = layer.at(slot).next;
                }
                assert_eq!(seen, linked);
                assert!(first == NONE || layer.at(first).previous == last);
                let reachable = if parent_is_held { 1 + linked.len() } else { 0 };
                assert_eq!(layer.reachable as usize, reachable);
            }
        }
    }

    /// Another digest under a key that is held is a collision: the block is not taken in, nor taken away.
    #[test]
    fn digests_tell_collisions() {
        let mut layer = Layer::default();
        assert_eq!(layer.store(1, Parent::Root, Some(b"digest one"), true), Stored::New);
        assert_eq!(layer.store(1, Parent::Root, Some(b"digest two"), true), Stored::Collision);
        assert_eq!(layer.remove(1, Some(b"digest two")), None);
        assert_eq!(layer.remove(1, None), Some(true));
        assert_eq!(layer.collisions, 1);
    }
}
