//! Reads an engine's events into an index: live ones, and by replay what was published before or left out.

use std::time::Duration;

use futures_util::StreamExt;
use kvhash::events::decode_batch;
use tokio::time::{sleep, timeout};
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket};
use zeromq::{ZmqError, ZmqMessage, ZmqResult};

use crate::index::Index;

/// The sequence number of a replay's end marker, -1.
const END: u64 = u64::MAX;
/// Between attempts where a connection fails.
const AGAIN: Duration = Duration::from_millis(200);

/// Where an engine's events are, and where it replays them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Its name.
    pub engine: String,
    /// The endpoint of its publisher.
    pub events: String,
    /// The endpoint of its replays; `None`: nowhere.
    pub replay: Option<String>,
    /// The longest that one replay may take.
    pub replay_timeout: Duration,
}

/// Read a source's events into the index, for ever.
///
/// What was published before is asked for by replay, and `ready` called once it is there or cannot be had; what a gap
/// leaves out is asked for too. What cannot be had makes the engine `Degraded`. A restart empties it: it is told by a
/// lower number with a later time, or after a new connection by a replay that lacks the last batch. An engine that is
/// not there yet, or goes, is connected to when it comes.
///
/// # Errors
/// An endpoint that nothing can be connected to.
pub async fn follow(source: Source, index: &Index, ready: impl FnOnce()) -> ZmqResult<()> {
    let mut ready = Some(ready);
    let mut socket = SubSocket::new();
    socket.subscribe("").await?;
    loop {
        match timeout(source.replay_timeout, socket.connect(&source.events)).await {
            Ok(Ok(())) => break,
            Ok(Err(error @ ZmqError::Endpoint(_))) => return Err(error),
            Ok(Err(_)) => sleep(AGAIN).await,
            Err(_) => {
                // Not there: nobody waits for it any longer.
                if let Some(ready) = ready.take() {
                    ready();
                }
            }
        }
    }
    let mut connections = socket.monitor();
    let mut follower = Follower { source, index, next: 0, last: 0.0 };
    follower.fill(END).await;
    if let Some(ready) = ready {
        ready();
    }
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Ok(message) => follower.take_frames(&message.into_vec()).await,
                Err(_) => sleep(AGAIN).await, // a connection's; the socket makes a new one
            },
            Some(event) = connections.next() => if let SocketEvent::Connected(..) = event {
                follower.reconnected().await;
            },
        }
    }
}

struct Follower<'a> {
    source: Source,
    index: &'a Index,
    /// The number that comes next.
    next: u64,
    /// The time of the last batch applied, by the engine's clock.
    last: f64,
}

impl Follower<'_> {
    /// Take in a live message: [topic, sequence number, payload].
    async fn take_frames(&mut self, frames: &[impl AsRef<[u8]>]) {
        let [_, seq, payload] = frames else { return };
        let Some(seq) = number(seq.as_ref()) else { return };
        self.take(seq, payload.as_ref()).await;
    }

    async fn take(&mut self, seq: u64, payload: &[u8]) {
        let Ok(batch) = decode_batch(payload) else {
            // Which life it is of cannot be told.
            self.lost();
            self.next = self.next.max(seq.saturating_add(1));
            return;
        };
        if seq < self.next {
            if batch.ts <= self.last {
                return; // it came by replay already
            }
            self.begin_life();
        }
        if seq > self.next {
            self.fill(seq).await;
        }
        if seq > self.next {
            self.lost();
        }
        if seq >= self.next {
            self.apply(seq, payload);
        }
    }

    fn apply(&mut self, seq: u64, payload: &[u8]) {
        match decode_batch(payload) {
            Ok(batch) => {
                self.index.apply(&self.source.engine, &batch);
                self.last = batch.ts;
            }
            Err(_) => self.lost(),
        }
        self.next = seq.wrapping_add(1);
    }

    fn lost(&self) {
        self.index.lost(&self.source.engine);
    }

    fn begin_life(&mut self) {
        self.index.remove(&self.source.engine);
        (self.next, self.last) = (0, 0.0);
    }

    /// The engine may be another process now, and may have published what did not come.
    async fn reconnected(&mut self) {
        if self.next > 0 && self.source.replay.is_none() {
            self.lost();
        }
        self.fill(END).await;
    }

    /// Apply what a replay has from the next number up to, and without, `before`.
    ///
    /// The last batch applied is asked for once more: an engine of the same life has it, or newer ones in its place.
    async fn fill(&mut self, before: u64) {
        let Some((mut replayed, mut whole)) = self.ask().await else { return };
        let last = replayed.iter().find(|(seq, _)| seq.wrapping_add(1) == self.next);
        let another = match last {
            Some((_, payload)) => decode_batch(payload).is_ok_and(|batch| batch.ts != self.last),
            None => whole && replayed.is_empty(),
        };
        if self.next > 0 && another {
            self.begin_life();
            (replayed, whole) = self.ask().await.unwrap_or_default();
        }
        let had = !replayed.is_empty();
        for (seq, payload) in replayed {
            if seq < self.next || seq >= before {
                continue;
            }
            if seq > self.next {
                self.lost();
            }
            self.apply(seq, &payload);
        }
        // One that had nothing and did not end is an engine that is not there; its first message says what was missed.
        if had && !whole {
            self.lost();
        }
    }

    /// Ask for the batches from the last one applied on; says whether they came to their end. `None`: nowhere to ask.
    async fn ask(&self) -> Option<(Vec<(u64, Vec<u8>)>, bool)> {
        let endpoint = self.source.replay.as_deref()?;
        let mut replayed = Vec::new();
        let asked = replay(endpoint, self.next.saturating_sub(1), &mut replayed);
        let whole = matches!(timeout(self.source.replay_timeout, asked).await, Ok(Ok(())));
        Some((replayed, whole))
    }
}

/// Ask for the batches from `start` on, into `messages`.
async fn replay(endpoint: &str, start: u64, messages: &mut Vec<(u64, Vec<u8>)>) -> ZmqResult<()> {
    let mut socket = DealerSocket::new();
    socket.connect(endpoint).await?;
    let mut request = ZmqMessage::from(Vec::new());
    request.push_back(start.to_be_bytes().to_vec().into());
    socket.send(request).await?;
    loop {
        let frames = socket.recv().await?.into_vec();
        // Releases before 0.26 leave the topic out: ["", seq, payload].
        let (seq, payload) = match &frames[..] {
            [_, _, seq, payload] | [_, seq, payload] => (seq, payload),
            _ => continue,
        };
        match number(seq) {
            None => {}
            Some(END) => return Ok(()),
            Some(seq) => messages.push((seq, payload.to_vec())),
        }
    }
}

fn number(frame: &[u8]) -> Option<u64> {
    frame.try_into().ok().map(u64::from_be_bytes)
}
