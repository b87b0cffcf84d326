//! A monitor's connection: its messages about memory, rings and features.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::fs::{FileType, OFlags};
use vdkit_serve::{Client, Export, Pool, Wake, peer_has_left};

use crate::channel::{Channel, Message};
use crate::device::{Device, QUEUE_SIZE_MAX, QUEUES_MAX, feature};
use crate::inflight::Area;
use crate::memory::{Memory, REGIONS_MAX};
use crate::queue::Ring;
use crate::rings::Slot;
use crate::server::ServerOptions;
use crate::wire::{
    Fields, InflightArea, MemoryRegion, RingAddresses, TooShort, backend_request, flag, invalid,
    protocol, request,
};

/// Interval at which the disk's size is polled.
const SIZE_POLL: Duration = Duration::from_millis(500);
/// Mask of the ring index in event descriptor messages.
const RING_MASK: u64 = 0xff;
/// The message carries no descriptor.
const NO_FD: u64 = 1 << 8;
/// Maximum memory regions per message.
const TABLE_MAX: u32 = 32;

/// Reply to a message.
enum Reply {
    /// None, or only success or failure.
    Done,
    Number(u64),
    Bytes(Vec<u8>),
    BytesAndFile(Vec<u8>, OwnedFd),
}

/// One connection.
pub struct Session {
    channel: Channel,
    device: Arc<Device>,
    pool: Arc<Pool>,
    memory: Memory,
    slots: Vec<Slot>,
    inflight: Option<Arc<Area>>,
    /// The guest has changed its write cache in this session.
    switched: bool,
    features: u64,
    protocol_features: u64,
    /// Channel for configuration changes.
    backend: Option<Channel>,
    sectors: u64,
}

impl Session {
    pub fn new(
        socket: UnixStream,
        export: Arc<Export>,
        writeback: Arc<AtomicBool>,
        options: &ServerOptions,
    ) -> io::Result<Self> {
        let watched = socket.try_clone()?;
        let client = Client::new(move || peer_has_left(&watched, PollFlags::empty()));
        let queues = options.queues_max.clamp(1, QUEUES_MAX);
        let device = Arc::new(Device::new(export, client, writeback, queues));
        let pool = Arc::new(Pool::new(options.threads_max));
        let ring = |index| Slot::new(Ring::new(index, device.clone(), pool.clone()));
        Ok(Self {
            channel: Channel::new(socket)?,
            slots: (0..queues).map(ring).collect(),
            sectors: device.sectors(),
            device,
            pool,
            memory: Memory::default(),
            inflight: None,
            switched: false,
            features: 0,
            protocol_features: 0,
            backend: None,
        })
    }

    /// Serves until the monitor disconnects or `stop` is set. `speaks` is called when it says the first
    /// word. On return, no request is running.
    pub fn run(mut self, stop: &Wake, speaks: impl FnOnce()) {
        if let Err(error) = self.talk(stop, speaks) {
            tracing::warn!("vhost-user: {error}: the connection ends");
        }
        for slot in &mut self.slots {
            slot.stop();
        }
        self.pool.close(Duration::MAX);
        self.device.export.forget(&self.device.client);
        self.channel.close();
    }

    fn talk(&mut self, stop: &Wake, speaks: impl FnOnce()) -> io::Result<()> {
        let mut speaks = Some(speaks);
        while let Some(ready) = stop.wait_within(&self.channel, SIZE_POLL)? {
            if ready {
                let Some(message) = self.channel.recv()? else { return Ok(()) };
                if let Some(speaks) = speaks.take() {
                    speaks();
                }
                self.answer(message)?;
            }
            self.report_size();
        }
        Ok(())
    }

    fn answer(&mut self, message: Message) -> io::Result<()> {
        let (number, needs_reply, size) =
            (message.request, message.needs_reply(), message.body.len());
        let acknowledge = needs_reply && self.agreed(protocol::REPLY_ACK);
        let send = |session: &Self, body: &[u8], file: Option<&OwnedFd>| {
            let file = file.map(std::os::fd::AsFd::as_fd);
            session.channel.send(number, flag::REPLY, body, file)
        };
        match self.handle(message) {
            Ok(Reply::Number(value)) => send(self, &value.to_ne_bytes(), None),
            Ok(Reply::Bytes(bytes)) => send(self, &bytes, None),
            Ok(Reply::BytesAndFile(bytes, file)) => send(self, &bytes, Some(&file)),
            Ok(Reply::Done) if acknowledge => send(self, &0_u64.to_ne_bytes(), None),
            Ok(Reply::Done) => Ok(()),
            Err(error) if acknowledge => {
                tracing::warn!(request = number, size, "vhost-user: {error}");
                send(self, &1_u64.to_ne_bytes(), None)
            }
            Err(error) => Err(error),
        }
    }

    fn agreed(&self, features: u64) -> bool {
        self.protocol_features & features == features
    }

    fn slot(&mut self, index: u32) -> io::Result<&mut Slot> {
        self.slots.get_mut(index as usize).ok_or_else(|| invalid("there is no such queue"))
    }

    fn handle(&mut self, message: Message) -> io::Result<Reply> {
        let mut fields = Fields(&message.body);
        match message.request {
            request::GET_FEATURES => return Ok(Reply::Number(self.device.features())),
            request::SET_FEATURES => self.set_features(fields.u64()?)?,
            request::SET_OWNER => {}
            request::RESET_OWNER => {
                for slot in &mut self.slots {
                    slot.enabled = false;
                    slot.stop();
                }
            }
            request::GET_MAX_MEM_SLOTS => return Ok(Reply::Number(REGIONS_MAX as u64)),
            request::SET_MEM_TABLE | request::ADD_MEM_REG | request::REM_MEM_REG => {
                self.change_memory(message)?;
            }
            request::GET_VRING_BASE => return self.take_away(fields.u32()?),
            request::SET_VRING_NUM
            | request::SET_VRING_ADDR
            | request::SET_VRING_BASE
            | request::SET_VRING_KICK
            | request::SET_VRING_CALL
            | request::SET_VRING_ERR
            | request::SET_VRING_ENABLE => self.change_ring(message)?,
            request::GET_PROTOCOL_FEATURES => return Ok(Reply::Number(protocol::OFFERED)),
            request::SET_PROTOCOL_FEATURES => {
                let features = fields.u64()?;
                if features & !protocol::OFFERED != 0 {
                    return Err(invalid("features of the protocol that were not offered"));
                }
                self.protocol_features = features;
            }
            request::GET_QUEUE_NUM => return Ok(Reply::Number(u64::from(self.device.queues))),
            request::SET_BACKEND_REQ_FD => {
                let file =
                    single(message.fds)?.ok_or_else(|| invalid("a message without its socket"))?;
                self.backend = Some(Channel::new(file.into())?);
            }
            request::GET_CONFIG => return self.get_config(&message.body),
            request::SET_CONFIG => self.set_config(&mut fields)?,
            request::GET_INFLIGHT_FD => return new_inflight_area(message),
            request::SET_INFLIGHT_FD => {
                let area = InflightArea::parse(&mut fields)?;
                let file = single(message.fds)?
                    .ok_or_else(|| invalid("in-flight records without a file"))?;
                self.inflight = Some(Arc::new(Area::open(area, file)?));
                self.take_over_writeback();
            }
            other => {
                tracing::debug!(request = other, "vhost-user: an unknown message");
                return Err(invalid("an unknown message"));
            }
        }
        Ok(Reply::Done)
    }

    fn change_memory(&mut self, message: Message) -> io::Result<()> {
        let mut fields = Fields(&message.body);
        if message.request == request::SET_MEM_TABLE {
            return self.set_memory(&mut fields, message.fds);
        }
        let _padding = fields.u64()?;
        let region = MemoryRegion::parse(&mut fields)?;
        if message.request == request::ADD_MEM_REG {
            let file = single(message.fds)?.ok_or_else(|| invalid("memory without a file"))?;
            self.memory.add(region, file)?;
        } else {
            self.memory.remove(region)?;
        }
        self.share_memory();
        Ok(())
    }

    fn change_ring(&mut self, message: Message) -> io::Result<()> {
        let mut fields = Fields(&message.body);
        match message.request {
            request::SET_VRING_NUM => {
                let (index, size) = (fields.u32()?, fields.u32()?);
                let size = u16::try_from(size).ok().filter(|size| *size <= QUEUE_SIZE_MAX);
                self.slot(index)?.setup.size =
                    size.ok_or_else(|| invalid("a queue that is too large"))?;
            }
            request::SET_VRING_ADDR => self.place(RingAddresses::parse(&mut fields)?)?,
            request::SET_VRING_BASE => {
                let (index, base) = (fields.u32()?, fields.u32()?);
                // The upper bits hold the wrap counters of packed rings.
                self.slot(index)?.setup.base = base as u16;
            }
            request::SET_VRING_KICK => {
                let (index, fd) = ring_fd(&mut fields, message.fds)?;
                self.slot(index)?.set_kick(fd);
                self.start(index)?;
            }
            request::SET_VRING_CALL => {
                let (index, fd) = ring_fd(&mut fields, message.fds)?;
                self.slot(index)?.ring.set_call(fd.map(File::from));
            }
            request::SET_VRING_ERR => {
                let (index, fd) = ring_fd(&mut fields, message.fds)?;
                self.slot(index)?.ring.set_err(fd.map(File::from));
            }
            _ => {
                let (index, enable) = (fields.u32()?, fields.u32()?);
                self.enable(index, enable != 0)?;
            }
        }
        Ok(())
    }

    /// Stops a ring; the reply is its position.
    fn take_away(&mut self, index: u32) -> io::Result<Reply> {
        let base = self.slot(index)?.take_away();
        let mut body = index.to_ne_bytes().to_vec();
        body.extend(u32::from(base).to_ne_bytes());
        Ok(Reply::Bytes(body))
    }

    fn set_config(&mut self, fields: &mut Fields<'_>) -> io::Result<()> {
        let (offset, size, _flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let bytes = fields.0.get(..size as usize).ok_or(TooShort)?;
        if !self.device.set_config(offset, bytes) {
            return Err(invalid("a setting that cannot be changed"));
        }
        self.switched = true;
        self.note_writeback();
        Ok(())
    }

    /// Takes over the write cache switch recorded by the previous server. If that and this server's
    /// own state differ, the cache is off, which is safe but slower.
    fn take_over_writeback(&self) {
        let noted = self.inflight.as_ref().and_then(|area| area.writeback());
        if noted == Some(false) && !self.switched {
            self.device.writeback.store(false, Ordering::Relaxed);
        }
        self.note_writeback();
    }

    fn note_writeback(&self) {
        if let Some(area) = &self.inflight {
            area.note_writeback(self.device.writeback.load(Ordering::Relaxed));
        }
    }

    fn set_features(&mut self, features: u64) -> io::Result<()> {
        if features & !self.device.features() != 0 {
            return Err(invalid("features that were not offered"));
        }
        self.features = features;
        self.device.acknowledge(features);
        // Without protocol features, no message enables a ring.
        if features & feature::PROTOCOL_FEATURES == 0 {
            for index in 0..u32::from(self.device.queues) {
                self.enable(index, true)?;
            }
        }
        Ok(())
    }

    fn set_memory(&mut self, fields: &mut Fields<'_>, fds: Vec<OwnedFd>) -> io::Result<()> {
        let count = fields.u32()?;
        let _padding = fields.u32()?;
        if count > TABLE_MAX || count as usize != fds.len() {
            return Err(invalid("the numbers of memory regions and of files differ"));
        }
        let pair = |fd| Ok((MemoryRegion::parse(fields)?, fd));
        let regions = fds.into_iter().map(pair).collect::<io::Result<Vec<_>>>()?;
        self.memory.set(regions)?;
        self.share_memory();
        Ok(())
    }

    fn share_memory(&self) {
        let mem = self.memory.mem();
        for slot in &self.slots {
            slot.ring.set_mem(mem.clone());
        }
    }

    fn place(&mut self, addresses: RingAddresses) -> io::Result<()> {
        let guest = |at| {
            let found = self.memory.guest_address(at);
            found.ok_or_else(|| invalid("a queue outside of memory"))
        };
        let descriptors = guest(addresses.descriptors)?;
        let (available, used) = (guest(addresses.available)?, guest(addresses.used)?);
        let slot = self.slot(addresses.index)?;
        slot.setup.descriptors = descriptors;
        slot.setup.available = available;
        slot.setup.used = used;
        slot.placed = true;
        self.start(addresses.index)
    }

    fn enable(&mut self, index: u32, enable: bool) -> io::Result<()> {
        let slot = self.slot(index)?;
        slot.enabled = enable;
        if enable {
            self.start(index)
        } else {
            slot.stop();
            Ok(())
        }
    }

    fn start(&mut self, index: u32) -> io::Result<()> {
        let event_idx = self.features & feature::EVENT_IDX != 0;
        let area = self.inflight.as_ref();
        let tracker = u16::try_from(index).ok().and_then(|index| area?.tracker(index));
        let slot = self.slot(index)?;
        if !slot.running() {
            slot.setup.event_idx = event_idx;
        }
        slot.start(tracker)
    }

    fn get_config(&self, body: &[u8]) -> io::Result<Reply> {
        let mut fields = Fields(body);
        let (offset, size) = (fields.u32()?, fields.u32()?);
        let mut reply = body.get(..12).ok_or(TooShort)?.to_vec();
        match self.device.config(offset, size) {
            Some(bytes) => reply.extend(bytes),
            // No payload means an error.
            None => reply[4..8].fill(0),
        }
        Ok(Reply::Bytes(reply))
    }

    /// Reports a new size to the guest.
    fn report_size(&mut self) {
        let sectors = self.device.sectors();
        if sectors == self.sectors {
            return;
        }
        self.sectors = sectors;
        let Some(backend) = &self.backend else { return };
        if let Err(error) = backend.send(backend_request::CONFIG_CHANGE_MSG, 0, &[], None) {
            tracing::warn!("vhost-user: the new size cannot be reported: {error}");
        }
    }
}

fn single(mut fds: Vec<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    if fds.len() > 1 {
        return Err(invalid("more than one file"));
    }
    Ok(fds.pop())
}

/// Memory for in-flight records, which the monitor keeps.
fn new_inflight_area(message: Message) -> io::Result<Reply> {
    let asked = InflightArea::parse(&mut Fields(&message.body))?;
    if asked.queues > QUEUES_MAX || asked.queue_size > QUEUE_SIZE_MAX {
        return Err(invalid("in-flight records of more requests than there can be"));
    }
    let (area, file) = Area::create(asked.queues.max(1), asked.queue_size.max(1))?;
    let mut body = message.body;
    area.put(&mut body);
    Ok(Reply::BytesAndFile(body, file))
}

/// A ring index and its event descriptor, which never blocks, whatever other processes do with it.
fn ring_fd(fields: &mut Fields<'_>, fds: Vec<OwnedFd>) -> io::Result<(u32, Option<OwnedFd>)> {
    let value = fields.u64()?;
    let fd = single(fds)?;
    if fd.is_some() == (value & NO_FD != 0) {
        return Err(invalid("a missing or unexpected event descriptor"));
    }
    if let Some(fd) = &fd {
        // Without a reader, writing to one of these raises SIGPIPE.
        let kind = FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode);
        if matches!(kind, FileType::Fifo | FileType::Socket) {
            return Err(invalid("an event descriptor that is a pipe or a socket"));
        }
        rustix::fs::fcntl_setfl(fd, rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
    }
    Ok(((value & RING_MASK) as u32, fd))
}
