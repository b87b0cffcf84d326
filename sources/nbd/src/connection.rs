//! One connection: many requests in flight, from many threads.
//!
//! ```text
//!   call ─► a free slot ─► header and payload, under `sending` ─► wait
//!                                                                  │ nobody reads: this thread leads
//!            lead: read a header ─► own reply? ─► read the rest into the caller's buffer ─► done,
//!                                      │ no                                    another thread leads
//!                                      └► the lead and the header go to the thread that waits for it
//! ```
//!
//! The bytes of a reply are read by the thread that asked for them, straight into its buffer.
//! Whatever reply arrives, its thread has to wake up anyway, so passing the lead costs no wake-up.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use vdkit_block::bytes::{be16, be32, be64};

use crate::channel::Channel;
use crate::failure::{Broken, Failure};
use crate::handshake::Agreed;
use crate::reply::{Expected, Head, Reply, Source};
use crate::wire::{self, CHUNK_BYTES, REQUEST_BYTES, SIMPLE_REPLY_BYTES, command};

/// Maximum requests in flight on a connection; further ones wait.
pub(crate) const IN_FLIGHT_MAX: usize = 16;
/// Bytes received ahead: small replies then cost one system call.
const AHEAD_BYTES: usize = 8 << 10;

/// A request to the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// Command of the protocol.
    pub(crate) command: u16,
    /// Flags of the command.
    pub(crate) flags: u16,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes of the effect.
    pub(crate) len: u32,
    /// The bytes to write; empty for other commands.
    pub(crate) payload: &'a [u8],
}

impl Request<'_> {
    fn header(&self, cookie: u64) -> [u8; REQUEST_BYTES] {
        let mut head = [0; REQUEST_BYTES];
        head[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        head[4..6].copy_from_slice(&self.flags.to_be_bytes());
        head[6..8].copy_from_slice(&self.command.to_be_bytes());
        head[8..16].copy_from_slice(&cookie.to_be_bytes());
        head[16..24].copy_from_slice(&self.offset.to_be_bytes());
        head[24..28].copy_from_slice(&self.len.to_be_bytes());
        head
    }
}

/// Bytes received ahead: `buf[start..end]`.
#[derive(Debug)]
struct Ahead {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
}

/// The receiving side, held by the leader.
struct Incoming<'a> {
    channel: &'a Channel,
    ahead: MutexGuard<'a, Ahead>,
}

impl Incoming<'_> {
    fn counted(received: std::io::Result<usize>) -> Result<usize, Broken> {
        match received {
            Ok(0) => Err(Broken::lost("the server closed the connection")),
            Ok(got) => Ok(got),
            Err(error) => Err(Broken::of(&error)),
        }
    }

    /// The next header.
    fn head(&mut self) -> Result<Head, Broken> {
        let mut magic = [0; 4];
        self.fill(&mut magic)?;
        match u32::from_be_bytes(magic) {
            wire::SIMPLE_REPLY_MAGIC => {
                let mut rest = [0; SIMPLE_REPLY_BYTES - 4];
                self.fill(&mut rest)?;
                Ok(Head::Simple { error: be32(&rest, 0), cookie: be64(&rest, 4) })
            }
            wire::CHUNK_MAGIC => {
                let mut rest = [0; CHUNK_BYTES - 4];
                self.fill(&mut rest)?;
                let (flags, kind) = (be16(&rest, 0), be16(&rest, 2));
                Ok(Head::Chunk { flags, kind, cookie: be64(&rest, 4), len: be32(&rest, 12) })
            }
            magic => Err(Broken::protocol(format!("a reply that begins with {magic:#010x}"))),
        }
    }
}

impl Source for Incoming<'_> {
    fn fill(&mut self, buf: &mut [u8]) -> Result<(), Broken> {
        let mut done = 0;
        while done < buf.len() {
            let Ahead { buf: ahead, start, end } = &mut *self.ahead;
            if start < end {
                let step = (*end - *start).min(buf.len() - done);
                buf[done..done + step].copy_from_slice(&ahead[*start..*start + step]);
                *start += step;
                done += step;
            } else if buf.len() - done >= ahead.len() {
                done += Self::counted(self.channel.recv_much(&mut buf[done..]))?;
            } else {
                (*start, *end) = (0, 0);
                *end = Self::counted(self.channel.recv(ahead))?;
            }
        }
        Ok(())
    }
}

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    /// The request with this cookie is being sent; a reply is possible.
    Sending(u64),
    /// Its thread waits for the reply.
    Waiting(u64),
    /// The header of its reply has arrived: its thread leads.
    Leads(Head),
}

#[derive(Debug)]
struct State {
    slots: [Slot; IN_FLIGHT_MAX],
    /// Number of the next request, in the upper part of its cookie.
    number: u64,
    /// A thread reads, or is about to.
    led: bool,
    broken: Option<Broken>,
}

impl State {
    /// The slot with this request.
    fn slot_of(&self, cookie: u64) -> Option<usize> {
        let slot = (cookie % IN_FLIGHT_MAX as u64) as usize;
        match self.slots[slot] {
            Slot::Sending(own) | Slot::Waiting(own) if own == cookie => Some(slot),
            _ => None,
        }
    }
}

/// A connection to an export.
#[derive(Debug)]
pub(crate) struct Connection {
    channel: Channel,
    agreed: Agreed,
    sending: Mutex<()>,
    receiving: Mutex<Ahead>,
    state: Mutex<State>,
    /// Wakes the thread of each slot.
    wakes: [Condvar; IN_FLIGHT_MAX],
    /// A slot became free.
    freed: Condvar,
    /// Requests in flight or waiting for a slot.
    busy: AtomicUsize,
}

impl Connection {
    /// A negotiated connection. The server is considered dead if it neither sends nor takes a byte
    /// for `silence` while a request waits.
    pub(crate) fn new(
        channel: Channel,
        agreed: Agreed,
        silence: Duration,
    ) -> std::io::Result<Self> {
        channel.set_timeout(Some(silence))?;
        let buf = vec![0; AHEAD_BYTES].into_boxed_slice();
        let slots = [Slot::Free; IN_FLIGHT_MAX];
        Ok(Self {
            channel,
            agreed,
            sending: Mutex::default(),
            receiving: Mutex::new(Ahead { buf, start: 0, end: 0 }),
            state: Mutex::new(State { slots, number: 1, led: false, broken: None }),
            wakes: [const { Condvar::new() }; IN_FLIGHT_MAX],
            freed: Condvar::new(),
            busy: AtomicUsize::new(0),
        })
    }

    /// What was negotiated.
    pub(crate) fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// Requests in flight or waiting for a slot.
    pub(crate) fn busy(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    /// Makes the connection unusable: all threads that wait return this failure, or the one that
    /// came before, which is returned. Requests may be sent again on another connection, so they
    /// must not be sent on this one any more.
    pub(crate) fn break_off(&self, broken: Broken) -> Broken {
        let first = self.state.lock().broken.get_or_insert(broken).clone();
        self.channel.abort();
        self.wakes.iter().chain([&self.freed]).for_each(|wake| {
            wake.notify_all();
        });
        first
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// The server's error; [`Failure::Broken`] if the connection is unusable. What `expected` holds
    /// is then undefined.
    pub(crate) fn call(
        &self,
        request: &Request<'_>,
        expected: Expected<'_>,
    ) -> Result<(), Failure> {
        self.busy.fetch_add(1, Ordering::Relaxed);
        let answered = self.call_counted(request, expected);
        self.busy.fetch_sub(1, Ordering::Relaxed);
        answered
    }

    fn call_counted(&self, request: &Request<'_>, expected: Expected<'_>) -> Result<(), Failure> {
        let (slot, cookie) = self.take_slot()?;
        let sent = {
            let _in_order = self.sending.lock();
            self.channel.send(&request.header(cookie), request.payload)
        };
        if let Err(error) = sent {
            self.break_off(Broken::of(&error));
        }
        let structured = self.agreed.structured;
        let mut reply = Reply::new(request.offset, request.len, structured, expected);
        // Who breaks a connection off closes its socket. A thread that receives then sees a lost
        // connection, though the first failure may forbid to send the request again.
        let received =
            self.receive(slot, cookie, &mut reply).map_err(|broken| self.break_off(broken));
        self.give_back(slot);
        received?;
        reply.result()
    }

    fn take_slot(&self) -> Result<(usize, u64), Broken> {
        let mut state = self.state.lock();
        loop {
            if let Some(broken) = &state.broken {
                return Err(broken.clone());
            }
            if let Some(slot) = state.slots.iter().position(|slot| *slot == Slot::Free) {
                let cookie = state.number * IN_FLIGHT_MAX as u64 + slot as u64;
                state.number += 1;
                state.slots[slot] = Slot::Sending(cookie);
                return Ok((slot, cookie));
            }
            self.freed.wait(&mut state);
        }
    }

    /// Waits for the lead: with the header of the own reply, or to read the next one.
    fn wait_for_lead(&self, slot: usize, cookie: u64) -> Result<Option<Head>, Broken> {
        let mut state = self.state.lock();
        if let Slot::Sending(_) = state.slots[slot] {
            state.slots[slot] = Slot::Waiting(cookie);
        }
        loop {
            if let Some(broken) = &state.broken {
                return Err(broken.clone());
            }
            if let Slot::Leads(head) = state.slots[slot] {
                state.slots[slot] = Slot::Waiting(cookie);
                return Ok(Some(head));
            }
            if !state.led {
                state.led = true;
                return Ok(None);
            }
            self.wakes[slot].wait(&mut state);
        }
    }

    /// Receives the reply to the request of a slot. The lead stays with this slot until
    /// [`Connection::give_back`].
    fn receive(&self, slot: usize, cookie: u64, reply: &mut Reply<'_>) -> Result<(), Broken> {
        loop {
            let mut head = self.wait_for_lead(slot, cookie)?;
            let mut incoming = Incoming { channel: &self.channel, ahead: self.receiving.lock() };
            loop {
                let next = match head.take() {
                    Some(head) => head,
                    None => incoming.head()?,
                };
                if next.cookie() != cookie {
                    drop(incoming);
                    self.pass_lead(next)?;
                    break;
                }
                if reply.receive(next, &mut incoming)? {
                    return Ok(());
                }
            }
        }
    }

    /// Passes the lead to the thread that waits for this reply.
    fn pass_lead(&self, head: Head) -> Result<(), Broken> {
        let mut state = self.state.lock();
        // After the connection broke, requests give up their slots while replies still arrive.
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        let Some(slot) = state.slot_of(head.cookie()) else {
            return Err(Broken::protocol("a reply to a request that was not sent"));
        };
        state.slots[slot] = Slot::Leads(head);
        drop(state);
        self.wakes[slot].notify_one();
        Ok(())
    }

    /// Frees a slot. Its thread has the lead, unless the connection is broken, and passes it on.
    fn give_back(&self, slot: usize) {
        let mut state = self.state.lock();
        state.slots[slot] = Slot::Free;
        state.led = false;
        let next = state.slots.iter().position(|slot| matches!(slot, Slot::Waiting(_)));
        drop(state);
        if let Some(next) = next {
            self.wakes[next].notify_one();
        }
        self.freed.notify_one();
    }

    /// Ends the connection; the server is informed of that by NBD_CMD_DISC.
    pub(crate) fn end(&self) {
        let request = Request { command: command::DISC, flags: 0, offset: 0, len: 0, payload: &[] };
        if self.state.lock().broken.is_none() && self.busy() == 0 {
            // The server may be gone already.
            let _ = self.channel.send(&request.header(0), &[]);
        }
        self.channel.shutdown();
    }
}
