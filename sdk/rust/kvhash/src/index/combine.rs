//! How far a rank's blocks carry a request: the hits of all KV cache groups combined, tier after tier.
//!
//! Lengths are in tokens here. Full attention gives the longest run from the start, every other kind accepts that length
//! or shortens it, and after a shortening all are asked again, as in vLLM's KV cache coordinator.

use std::cell::Cell;

use super::layer::{Hashes, Keys, Layer};

/// How a group is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Full,
    Window,
    State,
    Chunked,
}

impl Kind {
    /// The kind of a published name. One that is not known, and a window or chunk whose size is not known, is searched
    /// as full attention: that can claim too little, never too much.
    pub(super) fn of(published: Option<&str>, window: u64, chunk: u64) -> Self {
        match published {
            Some("sliding_window" | "sliding_window_mla") if window > 0 => Self::Window,
            Some("mamba") => Self::State,
            Some("chunked_local_attention") if chunk > 0 => Self::Chunked,
            _ => Self::Full,
        }
    }
}

/// Groups of one geometry, searched together: a block is there when each of their layers holds it.
pub(super) struct GroupView<'a> {
    pub(super) kind: Kind,
    pub(super) size: u64,
    pub(super) window: u64,
    pub(super) chunk: u64,
    pub(super) layers: Vec<&'a Layer>,
    keys: Keys<'a>,
    units: Keys<'a>,
    total: u64,
    hint: usize,
    run: Cell<Option<usize>>,
}

impl<'a> GroupView<'a> {
    pub(super) fn new(
        (kind, size, window, chunk): (Kind, u64, u64, u64),
        hashes: &'a dyn Hashes,
        unit: u64,
        hint: usize,
    ) -> Self {
        let factor = usize::try_from(size / unit).unwrap_or(usize::MAX);
        Self {
            kind,
            size,
            window,
            chunk,
            layers: Vec::with_capacity(1),
            keys: Keys::new(hashes, factor),
            units: Keys::new(hashes, 1),
            total: hashes.len() as u64 * unit,
            hint: hint / factor.max(1),
            run: Cell::new(None),
        }
    }

    pub(super) fn geometry(&self) -> (Kind, u64, u64, u64) {
        (self.kind, self.size, self.window, self.chunk)
    }

    /// How many of the request's first blocks are there.
    fn run(&self) -> u64 {
        let found = self.run.get().unwrap_or_else(|| {
            self.layers.iter().map(|layer| layer.run(&self.keys, 0, self.hint)).min().unwrap_or(0)
        });
        self.run.set(Some(found));
        found as u64
    }

    fn holds(&self, keys: &Keys<'_>, index: u64) -> bool {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        index < keys.count && self.layers.iter().all(|layer| layer.holds(keys, index))
    }
}

/// The greatest common divisor; of 0 and a number, that number.
pub(super) fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The longest prefix that all groups of one tier can go on from.
pub(super) struct Combination<'v, 'a> {
    groups: Vec<&'v GroupView<'a>>,
    unit: u64,
    hybrid: bool,
    fine: bool,
    alignment: u64,
}

impl<'v, 'a> Combination<'v, 'a> {
    pub(super) fn new(groups: &'v [GroupView<'a>], unit: u64) -> Self {
        let mut sorted: Vec<_> = groups.iter().collect();
        sorted.sort_by_key(|group| group.kind != Kind::Full);
        // Several groups of one geometry are a hybrid too: they are aligned to the lcm, which is their own size.
        let hybrid = groups.iter().map(|group| group.layers.len()).sum::<usize>() > 1;
        let states = groups.iter().any(|group| group.kind == Kind::State && group.size > unit);
        // Hits may end at any hash where a state block spans several and every group can be cut there.
        let cut =
            |group: &GroupView<'_>| matches!(group.kind, Kind::Full | Kind::State) || group.size == unit;
        let fine = hybrid && states && groups.iter().all(cut);
        let lcm = |a: u64, b: u64| (a / gcd(a, b)).saturating_mul(b);
        let alignment = if fine { unit } else { groups.iter().map(|group| group.size).fold(1, lcm) };
        Self { groups: sorted, unit, hybrid, fine, alignment }
    }

    /// The length of the hit, at most `max_length` tokens. `use_eagle`: a drafter needs its last unit recomputed.
    pub(super) fn longest(&self, max_length: u64, use_eagle: bool) -> u64 {
        let Some(first) = self.groups.first() else { return 0 };
        let full = first.kind == Kind::Full;
        let mut found = vec![None; self.groups.len()];
        // Groups whose unit is dropped already at the current length.
        let mut settled = vec![false; self.groups.len()];
        let mut length = max_length;
        loop {
            let mut current = length;
            for (number, group) in self.groups.iter().enumerate() {
                if let (Kind::Full, Some(known)) = (group.kind, found[number]) {
                    current = current.min(known);
                    continue;
                }
                let drop = use_eagle && !settled[number];
                let hit = self.hit(group, if drop { self.reach(group, current) } else { current }, drop);
                if drop {
                    settled[number] = true;
                } else if hit < current {
                    settled.fill(false);
                }
                found[number] = Some(hit);
                current = hit;
            }
            if !self.hybrid || current >= length {
                return current;
            }
            length = current;
            if self.groups.len() == 2 && full {
                return current;
            }
        }
    }

    /// How far to look when a unit will be dropped: one unit more, so that the hit can be `current`.
    fn reach(&self, group: &GroupView<'_>, current: u64) -> u64 {
        if !self.hybrid || group.kind == Kind::State {
            return current;
        }
        let inside = self.fine && group.kind == Kind::Full && group.size > self.unit;
        (current + if inside { self.unit } else { group.size }).min(group.total)
    }

    fn hit(&self, group: &GroupView<'_>, max_length: u64, drop: bool) -> u64 {
        match group.kind {
            Kind::Full => self.full(group, max_length, drop),
            Kind::Window => self.window(group, max_length, drop),
            Kind::State => self.state(group, max_length),
            Kind::Chunked => chunked(group, max_length),
        }
    }

    /// Whole blocks from the left up to the first miss, then the boundaries inside the next block.
    fn full(&self, group: &GroupView<'_>, max_length: u64, drop: bool) -> u64 {
        let (size, step) = (group.size, self.alignment);
        let mut length = group.run().min(max_length / size) * size;
        if step < size && size % step == 0 {
            let first = length / step;
            let last = (first + size / step - 1).min(max_length / step).min(group.units.count as u64);
            if let Some(index) = (first..last).rev().find(|&index| group.holds(&group.units, index)) {
                length = (index + 1) * step;
            }
        }
        if drop && length > 0 {
            length -= step.min(size);
        }
        length - length % step
    }

    /// From the right, the first run of blocks as long as a window; a shorter one counts only at the start.
    fn window(&self, group: &GroupView<'_>, max_length: u64, drop: bool) -> u64 {
        let (size, step) = (group.size, self.alignment);
        let need = (group.window - 1).div_ceil(size) + u64::from(drop);
        let (mut run, mut end) = (0, 0);
        let mut whole = false;
        for index in (0..max_length / size).rev() {
            if !group.holds(&group.keys, index) {
                run = 0;
                continue;
            }
            if run == 0 {
                if size != step && (index + u64::from(!drop)) * size % step != 0 {
                    continue; // no hit may end here
                }
                end = index + 1;
            }
            run += 1;
            if run >= need {
                whole = true;
                break;
            }
        }
        if !whole {
            end = self.aligned(run, size);
        }
        if drop && end > 0 {
            end = self.aligned(end - 1, size);
        }
        end * size
    }

    fn aligned(&self, blocks: u64, size: u64) -> u64 {
        let mut blocks = blocks;
        while size != self.alignment && !(blocks * size).is_multiple_of(self.alignment) {
            blocks -= 1;
        }
        blocks
    }

    /// From the right, the first state.
    fn state(&self, group: &GroupView<'_>, max_length: u64) -> u64 {
        let fine = self.alignment < group.size && group.size.is_multiple_of(self.alignment);
        let (step, keys) = if fine { (self.alignment, &group.units) } else { (group.size, &group.keys) };
        (1..=(max_length / step).min(keys.count as u64))
            .rev()
            .find(|blocks| blocks * step % self.alignment == 0 && group.holds(keys, blocks - 1))
            .map_or(0, |blocks| blocks * step)
    }
}

/// The blocks of the chunk that the hit's end lies in, from the left; chunks before it need none.
fn chunked(group: &GroupView<'_>, max_length: u64) -> u64 {
    let mut index = max_length / group.chunk * group.chunk / group.size;
    while index < max_length / group.size && group.holds(&group.keys, index) {
        index += 1;
    }
    index * group.size
}

/// How far a tier below the device carries on from `start` tokens, in whole chunks.
///
/// Full attention decides the run; a window group must hold the blocks of its window before the end (those before `start`
/// are on the device already), a state group the block at the end. `chunk_blocks`: blocks per chunk; 0: a chunk ends where
/// one of the tier's stores ended.
pub(super) fn continue_in_tier(
    groups: &[GroupView<'_>],
    start: u64,
    max_length: u64,
    chunk_blocks: u64,
) -> u64 {
    let whole = |group: &GroupView<'_>| matches!(group.kind, Kind::Full | Kind::Chunked);
    let full = || groups.iter().filter(|group| whole(group));
    let Some(mut length) = full().map(|group| whole_chunks(group, start, max_length, chunk_blocks)).min()
    else {
        return start;
    };
    let step = full().map(|group| group.size).fold(0, gcd);
    let serve =
        |length| groups.iter().filter(|group| !whole(group)).all(|group| serves(group, start, length));
    while length > start && !serve(length) {
        length = length.saturating_sub(step);
    }
    length.max(start)
}

fn whole_chunks(group: &GroupView<'_>, start: u64, max_length: u64, chunk_blocks: u64) -> u64 {
    let (size, keys) = (group.size, &group.keys);
    let (first, most) = (start / size, (keys.count as u64).min(max_length / size));
    if chunk_blocks == 0 {
        let from = first as usize;
        let run = group.layers.iter().map(|layer| layer.run(keys, from, 0)).min().unwrap_or(0);
        let mut end = run.min(most as usize);
        while end > from {
            let cut = group.layers.iter().map(|layer| layer.chunk_end(keys, from, end)).min().unwrap_or(from);
            if cut == end {
                break;
            }
            end = cut;
        }
        return end as u64 * size;
    }
    let mut end = first / chunk_blocks * chunk_blocks;
    while end + chunk_blocks <= most && group.holds(keys, end + chunk_blocks - 1) {
        end += chunk_blocks;
    }
    end * size
}

fn serves(group: &GroupView<'_>, start: u64, length: u64) -> bool {
    if !length.is_multiple_of(group.size) {
        return false;
    }
    let end = length / group.size;
    let need = if group.kind == Kind::State { 1 } else { (group.window - 1).div_ceil(group.size) };
    let first = end.saturating_sub(need).max(start / group.size);
    (first..end).all(|index| group.holds(&group.keys, index))
}
