//! A guest that runs the load itself: this host's kernel and fio under QEMU, without a root disk.
//!
//! [`initramfs`] builds the guest's initial files. The guest runs one script, prints its results to
//! a second serial port, and powers off. KVM runs the guest if possible; otherwise QEMU emulates
//! the processor, and the cell's notes say so.

mod initramfs;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::error::{Result, bail};
use vdkit_block::{CacheMode, CancelToken};
use vdkit_guest::Kernel;

use super::{Aio, READY, Server, serve};
use crate::engine::Bench;
use crate::layout::Image;
use crate::peers::{need, skip};
use crate::process::{Line, Running};

/// Bus of a guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// virtio-blk.
    Virtio,
    /// A SCSI disk behind virtio-scsi.
    Scsi,
    /// An IDE disk.
    Ide,
}

/// The program that reads and writes a guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// QEMU's block layer, which stops the guest when there is no space (`werror=enospc`).
    Qemu,
    /// QEMU's block layer, which reports every error to the guest (`werror=report`).
    QemuReporting,
    /// vdkit over vhost-user-blk.
    VhostUser,
    /// A server over NBD.
    Nbd(Server),
}

/// A guest that is ready to boot with a script.
#[derive(Debug)]
pub struct Guest {
    arguments: Vec<String>,
    initial: PathBuf,
    kernel: PathBuf,
    /// The disk's name in the guest.
    pub disk: &'static str,
}

/// Memory of a guest. While it boots, its initial files are in memory twice.
const MEMORY: &str = "768M";
/// Longest time of a guest besides its load: an emulated processor boots slowly.
const PATIENCE: Duration = Duration::from_secs(240);
/// Longest time for a kernel to prove that KVM works, which normally takes a second or two.
const PROOF: Duration = Duration::from_secs(15);
/// The script's end on the first serial port.
const ENDED: &str = "lab: the script ended with ";

impl Bus {
    fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Virtio => &["virtio_pci", "virtio_blk"],
            Self::Scsi => &["virtio_pci", "virtio_scsi", "sd_mod"],
            Self::Ide => &["ata_piix", "ata_generic", "sd_mod"],
        }
    }

    fn disk(self) -> &'static str {
        if self == Self::Virtio { "/dev/vda" } else { "/dev/sda" }
    }

    fn devices(self, write_cache: bool) -> Vec<String> {
        let cache = if write_cache { "on" } else { "off" };
        match self {
            Self::Virtio => vec![format!("virtio-blk-pci,drive=disk,write-cache={cache}")],
            Self::Scsi => vec![
                "virtio-scsi-pci".to_owned(),
                format!("scsi-hd,drive=disk,write-cache={cache}"),
            ],
            Self::Ide => vec![format!("ide-hd,drive=disk,bus=ide.0,write-cache={cache}")],
        }
    }
}

/// Whether guests can be run here; the kernel that they boot.
pub(super) fn available() -> Result<Kernel> {
    if std::env::consts::ARCH != "x86_64" {
        return skip("guests are run on x86-64 hosts only");
    }
    need("qemu-system-x86_64")?;
    initramfs::kernel()
}

/// Prepares a guest, and starts the server of its disk unless QEMU opens the image itself.
pub(super) fn prepare(
    bench: &mut Bench<'_>,
    bus: Bus,
    source: Source,
    image: &Image,
    cache: CacheMode,
) -> Result<(Guest, Option<Running>)> {
    let kernel = available()?;
    let initial = bench.folder.join("guest.cpio");
    initramfs::write(&kernel, bus.modules(), bus.disk(), &initial)?;
    let (mut arguments, mut server) = (Vec::new(), None);
    match source {
        Source::Qemu | Source::QemuReporting => {
            for node in serve::nodes(image, cache, Aio::Threads)? {
                arguments.extend(["-blockdev".to_owned(), node]);
            }
        }
        Source::Nbd(by) => {
            let socket = bench.folder.join("nbd.sock");
            server = Some(serve::nbd(bench, by, image, cache, &socket)?);
            let path = socket.display();
            let node = format!("driver=nbd,node-name=disk,server.type=unix,server.path={path}");
            arguments.extend(["-blockdev".to_owned(), node]);
        }
        Source::VhostUser => {
            let socket = bench.folder.join("vhost.sock");
            server = Some(vhost_user(bench, image, cache, &socket)?);
            let socket = format!("socket,id=disk,path={}", socket.display());
            let device = "vhost-user-blk-pci,chardev=disk";
            arguments.extend(["-chardev", &socket, "-device", device].map(str::to_owned));
        }
    }
    if source != Source::VhostUser {
        for device in bus.devices(!cache.write_durable()) {
            let reports = source == Source::QemuReporting && device.contains("drive=");
            let device = if reports { format!("{device},werror=report") } else { device };
            arguments.extend(["-device".to_owned(), device]);
        }
    }
    Ok((Guest { arguments, initial, kernel: kernel.image, disk: bus.disk() }, server))
}

fn vhost_user(
    bench: &mut Bench<'_>,
    image: &Image,
    cache: CacheMode,
    at: &Path,
) -> Result<Running> {
    let line = bench
        .vdkit(&["serve", "-f", image.format, "--cache", &cache.to_string()])
        .arg("--vhost-user")
        .arg(at)
        .arg(&image.path);
    let mut running = bench.start(&line)?;
    // Do not connect to test the server: it serves one virtual machine at a time.
    running.wait_until(READY, &bench.cancel, || at.exists())?;
    Ok(running)
}

/// The output of a guest's script on its results port (`$OUT`).
#[derive(Debug)]
pub struct Output {
    /// The results.
    pub results: String,
    /// Whether QEMU emulated the processor.
    pub emulated: bool,
}

impl Guest {
    /// Boots the guest, runs the script, and waits for the end. `seconds` is the duration of the
    /// load.
    ///
    /// # Errors
    /// The guest does not boot, the script fails, or the user interrupts.
    pub fn run(&self, bench: &mut Bench<'_>, script: &str, seconds: f64) -> Result<Output> {
        let mut booted = self.boot(bench, script)?;
        let most = PATIENCE + Duration::from_secs_f64(seconds.max(0.0));
        if !booted.running.wait_long(most, &bench.cancel)? {
            bail!("the guest does not shut down\nits console:\n{}", booted.console());
        }
        booted.output()
    }

    /// Boots the guest with a script and returns. QEMU listens for QMP ([`super::qmp`]) at
    /// [`Booted::monitor`].
    pub fn boot(&self, bench: &mut Bench<'_>, script: &str) -> Result<Booted> {
        let at = |name: &str| bench.folder.join(name);
        let (console, results, initrd) = (at("console.log"), at("results.log"), at("guest.initrd"));
        let monitor = at("qmp.sock");
        initramfs::with_job(&self.initial, script, &initrd)?;
        let serial = |path: &Path| format!("file:{}", path.display());
        let memory = format!("memory-backend-memfd,id=memory,size={MEMORY},share=on");
        let accelerator = accelerator(&self.kernel, &bench.cancel)?;
        let line = Line::new(need("qemu-system-x86_64")?)
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-machine", "pc,memory-backend=memory", "-cpu", "max", "-m", MEMORY])
            .args(["-object", &memory, "-accel", accelerator])
            .args(processors(accelerator))
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 loglevel=4 panic=-1 no_timer_check rdinit=/init"])
            .args(["-serial", &serial(&console), "-serial", &serial(&results)])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())])
            .args(&self.arguments);
        for line in script.lines() {
            bench.commands.push(format!("# in the guest: {line}"));
        }
        let running = bench.start(&line)?;
        Ok(Booted { running, console, results, monitor, emulated: accelerator == "tcg" })
    }
}

/// A running guest. It powers off when its script ends.
#[derive(Debug)]
pub struct Booted {
    running: Running,
    console: PathBuf,
    results: PathBuf,
    /// QEMU's QMP socket.
    pub monitor: PathBuf,
    emulated: bool,
}

impl Booted {
    /// As `Running::wait`.
    pub fn wait(&mut self, most: Duration) -> Result<bool> {
        self.running.wait(most)
    }

    /// The last lines of the guest's console.
    pub fn console(&self) -> String {
        last(&read(&self.console))
    }

    /// The script's output. The guest must have ended.
    ///
    /// # Errors
    /// The guest is still running, or its script failed.
    pub fn output(mut self) -> Result<Output> {
        let ended = self.running.ended()?;
        if !read(&self.console).contains(&format!("{ENDED}0\n")) {
            let (console, complaint) = (self.console(), ended.complaint());
            bail!("the guest's script failed\nits console:\n{console}{complaint}");
        }
        Ok(Output { results: read(&self.results), emulated: self.emulated })
    }
}

/// Returns `kvm` only if a kernel boots with it. That `/dev/kvm` opens, and even that QEMU sets up
/// a processor, does not suffice: with nested virtualization, firmware may run and Linux hang.
fn accelerator(kernel: &Path, cancel: &CancelToken) -> Result<&'static str> {
    static FOUND: OnceLock<&str> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    let works = comes_up("kvm", kernel, cancel, PROOF)?;
    Ok(FOUND.get_or_init(|| if works { "kvm" } else { "tcg" }))
}

/// Arguments for the number of processors. An emulated guest has one, but may have two: QEMU
/// translates a guest's atomic instructions into plain loads and stores if a second processor is
/// impossible, although its threads work on the disk's queue meanwhile. Then a request's interrupt may get
/// lost, and the guest waits for it forever.
fn processors(accelerator: &str) -> &'static [&'static str] {
    if accelerator == "tcg" { &["-smp", "1,maxcpus=2"] } else { &[] }
}

/// Whether the kernel boots with this accelerator within `most`. It boots until it finds no root
/// file system, and then ends.
fn comes_up(
    accelerator: &str,
    kernel: &Path,
    cancel: &CancelToken,
    most: Duration,
) -> Result<bool> {
    let mut running = Line::new(need("qemu-system-x86_64")?)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-machine", "pc", "-cpu", "max", "-m", "256M", "-accel", accelerator])
        .arg("-kernel")
        .arg(kernel)
        .args(["-append", "console=ttyS0 panic=-1 no_timer_check", "-serial", "stdio"])
        .start()?;
    if !running.wait_long(most, cancel)? {
        return Ok(false);
    }
    let ended = running.ended()?;
    Ok(ended.status.success() && ended.stdout.contains("Kernel panic"))
}

/// Arguments of fio for the cost of a load without its requests: one job, and one after it.
pub const FIO_OF_NOTHING: [&str; 10] = [
    "--output-format=json+",
    "--thread",
    "--name=load",
    "--ioengine=null",
    "--size=4k",
    "--name=flush",
    "--stonewall",
    "--new_group",
    "--ioengine=null",
    "--size=4k",
];

/// Durations of guests on this host, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuestSpeed {
    /// From building its initial files to its end, without its loads.
    pub boot: f64,
    /// One run of fio whose load takes no time.
    pub fio: f64,
}

/// Typical durations with an emulated processor.
impl Default for GuestSpeed {
    fn default() -> Self {
        Self { boot: 10.0, fio: 2.0 }
    }
}

/// Boots a guest that does not use its disk.
pub fn guest_speed(bench: &mut Bench<'_>) -> Result<GuestSpeed> {
    // Test KVM first: the result is cached, and a failing test takes long.
    accelerator(&initramfs::kernel()?.image, &bench.cancel)?;
    let path = bench.folder.join("disk.raw");
    std::fs::File::create(&path)?.set_len(1 << 20)?;
    let image = Image::file(path, "raw", 1 << 20);
    let began = Instant::now();
    let (guest, _) = prepare(bench, Bus::Virtio, Source::Qemu, &image, CacheMode::Writeback)?;
    let fio = FIO_OF_NOTHING.join(" ");
    let script = format!("cat /proc/uptime > $OUT\nfio {fio} || exit 1\ncat /proc/uptime > $OUT\n");
    let output = guest.run(bench, &script, 0.0)?;
    let all = began.elapsed().as_secs_f64();
    // Uptime before and after.
    let times: Vec<f64> =
        output.results.lines().filter_map(|line| line.split(' ').next()?.parse().ok()).collect();
    let [before, after] = times[..] else { bail!("the guest printed no times") };
    let fio = (after - before).clamp(0.0, all);
    Ok(GuestSpeed { boot: all - fio, fio })
}

fn read(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace("\r\n", "\n").replace('\r', "\n")
}

/// The last lines of a text.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;

    /// An emulated guest once waited for minutes for a request that was done: with one possible
    /// processor, the kernel and QEMU leave out the barriers of its atomic instructions.
    #[test]
    fn an_emulated_guest_keeps_its_barriers() {
        if !vdkit_testkit::guest::require_guest() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let place = Place::directory(folder.path()).unwrap();
        let mut references = std::collections::BTreeMap::new();
        let mut bench = Bench {
            command: PathBuf::from("true"),
            registry: &vdkit_chain::Registry::default(),
            cancel: CancelToken::default(),
            effort: crate::plan::Effort { rounds: 1, seconds: 0.1, disk: 1 << 20, bytes: 1 << 20 },
            seed: 1,
            place,
            folder: folder.path().to_owned(),
            axes: &Vec::new(),
            commands: Vec::new(),
            notes: Vec::new(),
            references: &mut references,
        };
        let path = folder.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let image = Image::file(path, "raw", 1 << 20);
        let made = prepare(&mut bench, Bus::Virtio, Source::Qemu, &image, CacheMode::Writeback);
        let script =
            "(cat /sys/devices/system/cpu/possible; grep -c ^processor /proc/cpuinfo) > $OUT";
        let output = made.unwrap().0.run(&mut bench, script, 0.0).unwrap();
        let processors: Vec<&str> = output.results.split_whitespace().collect();
        assert_eq!(processors, if output.emulated { ["0-1", "1"] } else { ["0", "1"] });
    }

    #[test]
    fn a_processor_that_comes_up_is_told_from_one_that_does_not() {
        if !vdkit_testkit::guest::require_guest() {
            return;
        }
        let kernel = vdkit_guest::Kernel::fetched().image;
        let comes_up = |accelerator, most| {
            comes_up(accelerator, &kernel, &CancelToken::default(), most).unwrap()
        };
        assert!(comes_up("tcg", PATIENCE));
        assert!(!comes_up("no-such-thing", PATIENCE));
        // A guest that hangs.
        assert!(!comes_up("tcg", Duration::ZERO));
        // Running firmware does not suffice.
        let nothing = tempfile::NamedTempFile::new().unwrap();
        let ended = super::comes_up("tcg", nothing.path(), &CancelToken::default(), PATIENCE);
        assert!(!ended.unwrap());
    }
}
