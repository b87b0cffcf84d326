//! A monitor and a virtio driver in one, as a minimal QEMU with its guest. It shares no code with
//! the server, so that both cannot have the same bug.
#![allow(dead_code, missing_docs)]

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

/// Start of guest memory, as guest and as monitor address.
pub const GUEST: u64 = 0x1000_0000;
const USER: u64 = 0x7000_0000_0000;
const MEMORY: u64 = 96 << 20;

/// Concurrent requests per queue, and descriptors for them.
pub const SLOTS: u16 = 64;
pub const QUEUE_SIZE: u16 = 256;
/// Data bytes per request.
pub const DATA: u64 = 256 << 10;
const QUEUE_BYTES: u64 = 1 << 20;
const AVAILABLE: u64 = 0x8000;
const USED: u64 = 0xc000;
const HEADERS: u64 = 0x1_0000;
const TABLES: u64 = 0x4_0000;
const PAYLOADS: u64 = 16 << 20;

pub const READ: u32 = 0;
pub const WRITE: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

const NEXT: u16 = 1;
const WRITE_ONLY: u16 = 2;
const INDIRECT: u16 = 4;

pub const F_RO: u64 = 1 << 5;
pub const F_FLUSH: u64 = 1 << 9;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;
/// Protocol feature: acknowledged messages.
const REPLY_ACK: u64 = 1 << 3;
/// Protocol feature: in-flight records.
const INFLIGHT: u64 = 1 << 12;

/// Timeout of all waits.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Data of a request.
#[derive(Clone, Copy)]
pub enum Data<'a> {
    None,
    /// To the device.
    Out(&'a [u8]),
    /// Read this many bytes from the device.
    In(u32),
}

pub struct Queue {
    base: u64,
    kick: OwnedFd,
    call: OwnedFd,
    available: u16,
    seen: u16,
    free: Vec<u16>,
    /// Finished requests, by slot.
    back: Vec<Option<u32>>,
    lens: Vec<u32>,
}

pub struct Guest {
    pub mem: GuestMemoryMmap<()>,
    file: File,
    pub queues: Vec<Queue>,
    pub features: u64,
    pub indirect: bool,
    socket: Option<UnixStream>,
    backend: Option<UnixStream>,
    /// In-flight records that the monitor keeps for the next server.
    pub inflight: Option<(Vec<u8>, OwnedFd)>,
    /// Features not to accept.
    without: u64,
    /// Protocol features of this driver, and those shared with the server.
    protocol: u64,
    agreed: u64,
}

fn numbers(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn pair(index: u32, value: u32) -> Vec<u8> {
    [index, value].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

impl Guest {
    pub fn new(queues: u16) -> Self {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
        file.set_len(MEMORY).unwrap();
        let range = (
            GuestAddress(GUEST),
            MEMORY as usize,
            Some(FileOffset::new(file.try_clone().unwrap(), 0)),
        );
        let mem = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let event = || {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            rustix::event::eventfd(0, flags).unwrap()
        };
        let queue = |index: u16| Queue {
            base: GUEST + u64::from(index) * QUEUE_BYTES,
            kick: event(),
            call: event(),
            available: 0,
            seen: 0,
            free: (0..SLOTS).rev().collect(),
            back: vec![None; usize::from(SLOTS)],
            lens: vec![0; usize::from(SLOTS)],
        };
        Self {
            mem,
            file,
            queues: (0..queues).map(queue).collect(),
            features: 0,
            indirect: false,
            socket: None,
            backend: None,
            inflight: None,
            without: 0,
            agreed: 0,
            protocol: 1 | REPLY_ACK | 1 << 5 | 1 << 9 | INFLIGHT | 1 << 15,
        }
    }

    pub fn without(mut self, features: u64) -> Self {
        self.without = features;
        self
    }

    /// A monitor without in-flight records.
    pub fn without_notes(mut self) -> Self {
        self.protocol &= !INFLIGHT;
        self
    }

    /// A guest with a running device.
    pub fn boot(path: &Path, queues: u16) -> Self {
        let mut guest = Self::new(queues);
        guest.connect(path);
        guest.start();
        guest
    }

    fn socket(&self) -> &UnixStream {
        self.socket.as_ref().unwrap()
    }

    pub fn send(&self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut bytes = request.to_ne_bytes().to_vec();
        bytes.extend((flags | 1).to_ne_bytes());
        bytes.extend((body.len() as u32).to_ne_bytes());
        bytes.extend(body);
        self.send_bytes(&bytes, fds);
    }

    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let parts = [IoSlice::new(bytes)];
        let flags = SendFlags::NOSIGNAL;
        let sent = rustix::net::sendmsg(self.socket(), &parts, &mut control, flags).unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn reply(&self, request: u32) -> (Vec<u8>, Vec<OwnedFd>) {
        let mut header = [0; 12];
        let mut fds = Vec::new();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut parts = [std::io::IoSliceMut::new(&mut header)];
        let flags = rustix::net::RecvFlags::CMSG_CLOEXEC | rustix::net::RecvFlags::WAITALL;
        let got = rustix::net::recvmsg(self.socket(), &mut parts, &mut control, flags).unwrap();
        assert_eq!(got.bytes, 12, "the server left");
        for message in control.drain() {
            if let rustix::net::RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, 5));
        let mut body = vec![0; word(8) as usize];
        self.socket().read_exact(&mut body).unwrap();
        (body, fds)
    }

    /// Asks for a number.
    pub fn get(&self, request: u32) -> u64 {
        self.send(request, 0, &[], &[]);
        u64::from_ne_bytes(self.reply(request).0.try_into().unwrap())
    }

    /// Sets something; returns whether the server accepted it.
    pub fn try_set(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        if self.agreed & REPLY_ACK == 0 {
            self.send(request, 0, body, fds);
            return true;
        }
        self.send(request, 8, body, fds);
        u64::from_ne_bytes(self.reply(request).0.try_into().unwrap()) == 0
    }

    fn set(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        assert!(self.try_set(request, body, fds), "request {request} was refused");
    }

    pub fn config(&self, offset: u32, len: u32) -> Vec<u8> {
        let mut body = pair(offset, len);
        body.extend([0; 4]);
        body.resize(12 + len as usize, 0);
        self.send(24, 0, &body, &[]);
        self.reply(24).0[12..].to_vec()
    }

    pub fn config_u64(&self, offset: u32) -> u64 {
        u64::from_le_bytes(self.config(offset, 8).try_into().unwrap())
    }

    pub fn config_u32(&self, offset: u32) -> u32 {
        u32::from_le_bytes(self.config(offset, 4).try_into().unwrap())
    }

    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> bool {
        let mut body = pair(offset, bytes.len() as u32);
        body.extend([0; 4]);
        body.extend(bytes);
        self.try_set(25, &body, &[])
    }

    /// Negotiates features and shares the memory.
    pub fn connect(&mut self, path: &Path) {
        let began = Instant::now();
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(error) if began.elapsed() > PATIENCE => panic!("{error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        self.socket = Some(socket);
        self.features = self.get(1) & !self.without;
        let protocol = self.get(15);
        assert_eq!(protocol & (1 << 9), 1 << 9, "no configuration space");
        let protocol = protocol & self.protocol;
        self.send(16, 0, &numbers(&[protocol]), &[]);
        self.agreed = protocol;
        self.send(3, 0, &[], &[]);
        self.send(2, 0, &numbers(&[self.features]), &[]);
        if protocol & (1 << 5) != 0 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(PATIENCE)).unwrap();
            self.set(21, &[], &[theirs.as_fd()]);
            self.backend = Some(ours);
        }
        if protocol & INFLIGHT != 0 {
            if self.inflight.is_none() {
                let mut body = numbers(&[0, 0]);
                let counts = [self.queues.len() as u16, QUEUE_SIZE];
                body.extend(counts.iter().flat_map(|count| count.to_ne_bytes()));
                body.extend([0; 4]);
                self.send(31, 0, &body, &[]);
                let (body, mut fds) = self.reply(31);
                self.inflight = Some((body, fds.pop().unwrap()));
            }
            let (body, file) = self.inflight.as_ref().unwrap();
            self.set(32, body, &[file.as_fd()]);
        }
        let mut table = pair(1, 0);
        table.extend(numbers(&[GUEST, MEMORY, USER, 0]));
        self.set(5, &table, &[self.file.as_fd()]);
    }

    /// Renegotiates, as when a migration begins or the guest resets the device.
    pub fn agree_again(&self) {
        self.send(2, 0, &numbers(&[self.features]), &[]);
        // The reply comes after the negotiation.
        self.get(1);
    }

    /// Starts all queues at their positions.
    pub fn start(&mut self) {
        for index in 0..self.queues.len() as u32 {
            let queue = &self.queues[index as usize];
            let base = queue.seen;
            self.start_queue(index, base);
        }
    }

    pub fn start_queue(&self, index: u32, base: u16) {
        let queue = &self.queues[index as usize];
        let user = queue.base - GUEST + USER;
        self.set(8, &pair(index, QUEUE_SIZE.into()), &[]);
        self.set(10, &pair(index, base.into()), &[]);
        let mut addresses = pair(index, 0);
        addresses.extend(numbers(&[user, user + USED, user + AVAILABLE, 0]));
        self.set(9, &addresses, &[]);
        self.set(12, &numbers(&[u64::from(index)]), &[queue.kick.as_fd()]);
        self.set(13, &numbers(&[u64::from(index)]), &[queue.call.as_fd()]);
        if self.features & F_PROTOCOL != 0 {
            self.set(18, &pair(index, 1), &[]);
        }
    }

    /// Stops a queue and returns its position.
    pub fn stop_queue(&self, index: u32) -> u16 {
        self.send(11, 0, &pair(index, 0), &[]);
        let (body, _) = self.reply(11);
        u32::from_ne_bytes(body[4..8].try_into().unwrap()) as u16
    }

    /// Closes the connection abruptly.
    pub fn disconnect(&mut self) {
        self.socket = None;
        self.backend = None;
    }

    /// Waits for a message about the configuration space.
    pub fn config_change(&self) {
        let mut message = [0; 12];
        self.backend.as_ref().unwrap().read_exact(&mut message).unwrap();
        assert_eq!(message[0], 2);
    }

    fn payload(&self, queue: usize, slot: u16) -> u64 {
        GUEST + PAYLOADS + (queue as u64 * u64::from(SLOTS) + u64::from(slot)) * DATA
    }

    pub fn put<T: vm_memory::ByteValued>(&self, at: u64, value: T) {
        self.mem.write_obj(value, GuestAddress(at)).unwrap();
    }

    fn descriptor(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        self.put(at, address.to_le());
        self.put(at + 8, len.to_le());
        self.put(at + 12, flags.to_le());
        self.put(at + 14, next.to_le());
    }

    /// Puts a chain of descriptors at a slot: address, length, flags without NEXT.
    pub fn chain(&self, queue: usize, slot: u16, parts: &[(u64, u32, u16)]) {
        let base = self.queues[queue].base;
        let head = slot * (QUEUE_SIZE / SLOTS);
        let (table, first) = match self.indirect {
            true => (base + TABLES + u64::from(slot) * 1024, 0),
            false => (base, head),
        };
        for (i, (address, len, flags)) in (first..).zip(parts) {
            let more = i - first + 1 < parts.len() as u16;
            let flags = flags | if more { NEXT } else { 0 };
            self.descriptor(table + u64::from(i) * 16, *address, *len, flags, i + 1);
        }
        if self.indirect {
            let bytes = parts.len() as u32 * 16;
            self.descriptor(base + u64::from(head) * 16, table, bytes, INDIRECT, 0);
        }
    }

    /// Makes a head available and kicks.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let it = &mut self.queues[queue];
        let at = it.base + AVAILABLE + 4 + 2 * u64::from(it.available % QUEUE_SIZE);
        self.mem.write_obj(head.to_le(), GuestAddress(at)).unwrap();
        it.available = it.available.wrapping_add(1);
        self.set_available(queue, self.queues[queue].available);
        self.kick(queue);
    }

    pub fn set_available(&self, queue: usize, index: u16) {
        let at = GuestAddress(self.queues[queue].base + AVAILABLE + 2);
        self.mem.store(index.to_le(), at, Ordering::Release).unwrap();
    }

    pub fn kick(&self, queue: usize) {
        rustix::io::write(&self.queues[queue].kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Submits a request.
    pub fn submit(&mut self, queue: usize, kind: u32, sector: u64, data: Data<'_>) -> u16 {
        let slot = self.prepare(queue, kind, sector, data);
        self.offer(queue, slot * (QUEUE_SIZE / SLOTS));
        slot
    }

    /// Writes a request into memory without making it available.
    pub fn prepare(&mut self, queue: usize, kind: u32, sector: u64, data: Data<'_>) -> u16 {
        let slot = self.queues[queue].free.pop().expect("too many requests at once");
        let header = self.queues[queue].base + HEADERS + u64::from(slot) * 64;
        self.put(header, kind.to_le());
        self.put(header + 4, 0_u32);
        self.put(header + 8, sector.to_le());
        self.put(header + 32, 0xff_u8);
        let payload = self.payload(queue, slot);
        let mut parts = vec![(header, 16, 0)];
        self.queues[queue].lens[usize::from(slot)] = 0;
        match data {
            Data::None => {}
            Data::Out(bytes) => {
                self.mem.write_slice(bytes, GuestAddress(payload)).unwrap();
                parts.push((payload, bytes.len() as u32, 0));
            }
            Data::In(len) => {
                parts.push((payload, len, WRITE_ONLY));
                self.queues[queue].lens[usize::from(slot)] = len;
            }
        }
        parts.push((header + 32, 1, WRITE_ONLY));
        self.chain(queue, slot, &parts);
        slot
    }

    /// Collects finished requests, and enables notifications for later ones.
    pub fn collect(&mut self, queue: usize) -> usize {
        let it = &mut self.queues[queue];
        let at = |offset: u64| GuestAddress(it.base + USED + offset);
        let event = GuestAddress(it.base + AVAILABLE + 4 + 2 * u64::from(QUEUE_SIZE));
        let mut count = 0;
        loop {
            let used: u16 = self.mem.load(at(2), Ordering::Acquire).unwrap();
            while it.seen != used {
                let entry = 4 + 8 * u64::from(it.seen % QUEUE_SIZE);
                let head: u32 = self.mem.read_obj(at(entry)).unwrap();
                let len: u32 = self.mem.read_obj(at(entry + 4)).unwrap();
                let slot = head as usize / usize::from(QUEUE_SIZE / SLOTS);
                assert!(it.back[slot].is_none(), "slot {slot} came back twice");
                it.back[slot] = Some(len);
                it.seen = it.seen.wrapping_add(1);
                count += 1;
            }
            self.mem.store(it.seen.to_le(), event, Ordering::SeqCst).unwrap();
            std::sync::atomic::fence(Ordering::SeqCst);
            // Requests finished before the device saw this are not notified.
            let now: u16 = self.mem.load(at(2), Ordering::Acquire).unwrap();
            if now == it.seen {
                return count;
            }
        }
    }

    /// Waits for a notification, at most `most`. Returns whether there was one.
    pub fn wait_call(&self, queue: usize, most: Duration) -> bool {
        let call = &self.queues[queue].call;
        let mut fds = [PollFd::new(call, PollFlags::IN)];
        let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        rustix::event::poll(&mut fds, Some(&most)).unwrap();
        rustix::io::read(call, &mut [0_u8; 8]).is_ok()
    }

    /// Whether a request has finished.
    pub fn is_back(&mut self, queue: usize, slot: u16) -> bool {
        self.collect(queue);
        self.queues[queue].back[usize::from(slot)].is_some()
    }

    /// Waits for a request: status and data.
    pub fn finish(&mut self, queue: usize, slot: u16) -> (u8, Vec<u8>) {
        let began = Instant::now();
        while !self.is_back(queue, slot) {
            assert!(began.elapsed() < PATIENCE, "a request does not come back");
            self.wait_call(queue, PATIENCE);
        }
        let (status, len) = self.release(queue, slot);
        let mut data = vec![0; len as usize];
        self.mem.read_slice(&mut data, GuestAddress(self.payload(queue, slot))).unwrap();
        (status, data)
    }

    /// Frees the slot of a finished request: status, and requested bytes.
    pub fn release(&mut self, queue: usize, slot: u16) -> (u8, u32) {
        let it = &mut self.queues[queue];
        let used = it.back[usize::from(slot)].take().expect("not back");
        let header = it.base + HEADERS + u64::from(slot) * 64;
        let status: u8 = self.mem.read_obj(GuestAddress(header + 32)).unwrap();
        let it = &mut self.queues[queue];
        it.free.push(slot);
        let len = it.lens[usize::from(slot)];
        if status == 0 && len > 0 {
            assert!(used > 1 && used <= len + 1, "{used} bytes of {len}");
        }
        (status, len)
    }

    /// Finished slots that are not released.
    pub fn returned(&self, queue: usize) -> Vec<u16> {
        let back = &self.queues[queue].back;
        (0..SLOTS).filter(|slot| back[usize::from(*slot)].is_some()).collect()
    }

    pub fn run(&mut self, queue: usize, kind: u32, sector: u64, data: Data<'_>) -> (u8, Vec<u8>) {
        let slot = self.submit(queue, kind, sector, data);
        self.finish(queue, slot)
    }

    pub fn read(&mut self, queue: usize, sector: u64, len: u32) -> Vec<u8> {
        let (status, data) = self.run(queue, READ, sector, Data::In(len));
        assert_eq!(status, 0, "read {len} at sector {sector}");
        data
    }

    pub fn write(&mut self, queue: usize, sector: u64, bytes: &[u8]) {
        let (status, _) = self.run(queue, WRITE, sector, Data::Out(bytes));
        assert_eq!(status, 0, "write {} at sector {sector}", bytes.len());
    }

    pub fn flush(&mut self, queue: usize) {
        assert_eq!(self.run(queue, FLUSH, 0, Data::None).0, 0);
    }
}

/// A discard or write-zeroes range.
pub fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}
