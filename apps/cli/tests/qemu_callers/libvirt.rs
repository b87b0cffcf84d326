//! libvirt's directory pools.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use vdkit_testkit::{require_peer, require_root};

use crate::{Stage, said};

/// Runs in namespaces of its own, as their first process: libvirtd keeps its state where no other
/// libvirtd sees it, and all that it started ends with this shell. The shell also reaps the emulators,
/// which libvirt would otherwise take for alive.
const SCRIPT: &str = r#"
set -e
mount --make-rprivate /
mount -t proc proc /proc
for folder in /etc/libvirt /run/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt /var/tmp; do
  mkdir -p $folder
  mount -t tmpfs none $folder
done
# libvirt looks this user up even where its configuration names another.
for file in passwd group; do
  { cat /etc/$file; grep -q ^libvirt-qemu: /etc/$file || echo "$1"; } >/etc/libvirt/$file
  mount --bind /etc/libvirt/$file /etc/$file
  shift
done
cat >/etc/libvirt/qemu.conf <<END
user = "root"
group = "root"
security_driver = "none"
namespaces = [ ]
cgroup_controllers = [ ]
stdio_handler = "file"
END
printf 'auth_unix_rw = "none"\nlog_outputs = "3:file:%s"\n' "$1" >/etc/libvirt/libvirtd.conf
timeout 60 libvirtd -d -p /run/libvirt/daemon.pid -f /etc/libvirt/libvirtd.conf >&2
echo ready
sleep 600 &
wait $!
"#;

/// A libvirtd that calls vdkit. Dropping it ends it, and its guests.
pub struct Libvirt {
    pub stage: Stage,
    spaces: Child,
}

impl Libvirt {
    /// `None` where libvirt cannot run (see [`require_peer`]).
    pub fn start() -> Option<Self> {
        let peers = ["libvirtd", "virsh", "qemu-img", "qemu-io", "qemu-system-x86_64"];
        if !require_root() || !peers.iter().all(|peer| require_peer(peer)) {
            return None;
        }
        let stage = Stage::new();
        std::fs::create_dir(stage.path("pool")).unwrap();
        // The namespaces end with this test's thread, whatever ends it.
        let mut spaces = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"])
            .args(["sh", "-c", SCRIPT, "sh"])
            .args(["libvirt-qemu:x:64055:64055::/:/bin/false", "libvirt-qemu:x:64055:"])
            .arg(stage.path("libvirtd.log"))
            .env("PATH", stage.search_path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        let heard = spaces.stdout.as_mut().unwrap().read_exact(&mut ready);
        let libvirt = Self { stage, spaces };
        heard.unwrap_or_else(|error| panic!("libvirtd: {error}\n{}", libvirt.log()));
        libvirt.virsh(&["pool-create-as", "pool", "dir", "--target", &libvirt.in_pool("")]);
        Some(libvirt)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.stage.path("libvirtd.log")).unwrap_or_default()
    }

    pub fn in_pool(&self, volume: &str) -> String {
        self.stage.text(&format!("pool/{volume}"))
    }

    /// Runs a client in the daemon's namespaces.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let process = format!("/proc/{}/ns", self.spaces.id());
        let mounts = format!("--mount={process}/mnt");
        let processes = format!("--pid={process}/pid_for_children");
        let mut all = vec![&mounts, &processes, program];
        all.extend(arguments);
        let mut command = self.stage.command("nsenter", &all);
        command.env("LIBVIRT_DEFAULT_URI", "qemu:///system").env("LC_ALL", "C.UTF-8");
        said(command)
    }

    pub fn virsh(&self, arguments: &[&str]) -> String {
        self.run("virsh", arguments)
    }

    /// Makes a volume as XML describes it.
    pub fn volume(&self, name: &str, mebibytes: u32, target: &str) {
        let file = self.volume_file(name, mebibytes, target);
        self.virsh(&["vol-create", "pool", &file]);
    }

    fn volume_file(&self, name: &str, mebibytes: u32, target: &str) -> String {
        let xml = format!(
            "<volume><name>{name}</name><capacity unit='MiB'>{mebibytes}</capacity>\
             <target>{target}</target></volume>"
        );
        self.stage.scratch.write(&format!("{name}.xml"), xml.as_bytes()).display().to_string()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let _ = self.spaces.kill();
        let _ = self.spaces.wait();
        if std::thread::panicking() {
            eprintln!("{}\n{}", self.stage.calls().join("\n"), self.log());
        }
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn a_pool_makes_clones_and_resizes_volumes() {
    let Some(libvirt) = Libvirt::start() else { return };
    let stage = &libvirt.stage;
    let create = |name: &str, size: &str, more: &[&str]| {
        libvirt.virsh(&[&["vol-create-as", "pool", name, size], more].concat());
    };
    create("a.qcow2", "64M", &["--format", "qcow2"]);
    create("a.raw", "64M", &["--format", "raw"]);
    create("half.raw", "16M", &["--format", "raw", "--allocation", "8M"]);
    create("full.qcow2", "16M", &["--format", "qcow2", "--allocation", "16M"]);
    create("meta.qcow2", "16M", &["--format", "qcow2", "--prealloc-metadata"]);
    for format in ["vmdk", "vdi", "vpc"] {
        create(&format!("a.{format}"), "16M", &["--format", format]);
    }
    let write = ["-c", "write -P 7 3M 1M", &libvirt.in_pool("a.qcow2")];
    stage.qemu("qemu-io", &write);
    let over = ["--format", "qcow2", "--backing-vol", "a.qcow2", "--backing-vol-format", "qcow2"];
    create("over.qcow2", "64M", &over);
    for name in ["a.qcow2", "a.raw", "over.qcow2"] {
        libvirt.virsh(&["vol-clone", name, &format!("clone-{name}"), "--pool", "pool"]);
    }
    let raw = libvirt.volume_file("from.raw", 64, "<format type='raw'/>");
    libvirt.virsh(&["vol-create-from", "pool", &raw, "a.qcow2", "--inputpool", "pool"]);
    for name in ["clone-a.qcow2", "clone-over.qcow2", "over.qcow2", "from.raw"] {
        let images = [&libvirt.in_pool("a.qcow2"), &libvirt.in_pool(name)];
        stage.qemu("qemu-img", &["compare", "-q", images[0], images[1]]);
    }
    for name in ["a.raw", "a.qcow2"] {
        libvirt.virsh(&["vol-resize", name, "128M", "--pool", "pool"]);
        stage.sound(&libvirt.in_pool(name), name.split_once('.').unwrap().1, 128 * MIB);
    }
    // libvirt reads the headers itself.
    let info = libvirt.virsh(&["vol-info", "a.qcow2", "--pool", "pool"]);
    assert!(info.contains("128.00 MiB"), "{info}");
    let xml = libvirt.virsh(&["vol-dumpxml", "over.qcow2", "--pool", "pool"]);
    assert!(xml.contains(&format!("<path>{}</path>", libvirt.in_pool("a.qcow2"))), "{xml}");
    for (name, mebibytes) in [("clone-over", 64), ("over", 64), ("full", 16), ("meta", 16)] {
        stage.sound(&libvirt.in_pool(&format!("{name}.qcow2")), "qcow2", mebibytes * MIB);
    }
    stage.assert_called(&["qemu-img create -f qcow2 -o compat=0.10 ", "a.qcow2 65536K"]);
    stage.assert_called(&["create -f qcow2 -b ", "backing_fmt=qcow2"]);
    stage.assert_called(&["create -f qcow2 -o preallocation=", "meta.qcow2"]);
    stage.assert_called(&["convert -f qcow2 -O qcow2 ", "clone-over.qcow2"]);
    stage.assert_called(&["convert -f qcow2 -O raw ", "from.raw"]);
    stage.assert_called(&["resize ", "a.qcow2 134217728"]);
}

#[test]
fn a_pool_makes_encrypted_volumes() {
    let Some(libvirt) = Libvirt::start() else { return };
    let stage = &libvirt.stage;
    let id = "f52a81b2-424e-490c-823d-6bd4235bc572";
    let secret = format!("<secret private='yes'><uuid>{id}</uuid></secret>");
    let secret = stage.scratch.write("secret.xml", secret.as_bytes()).display().to_string();
    libvirt.virsh(&["secret-define", &secret]);
    stage.scratch.write("words", b"open sesame");
    libvirt.virsh(&["secret-set-value", id, "--file", &stage.text("words"), "--plain"]);
    for (format, features) in [("raw", ""), ("qcow2", "<compat>1.1</compat>")] {
        let target = format!(
            "<format type='{format}'/>{features}<encryption format='luks'>\
             <secret type='passphrase' uuid='{id}'/></encryption>"
        );
        let [plain, new, from, clone] =
            ["plain", "new", "from", "clone"].map(|name| format!("{name}.{format}"));
        libvirt.virsh(&["vol-create-as", "pool", &plain, "16M", "--format", format]);
        let pattern = "write -P 5 1M 2M";
        stage.qemu("qemu-io", &["-f", format, "-c", pattern, &libvirt.in_pool(&plain)]);
        libvirt.volume(&new, 16, &target);
        let file = libvirt.volume_file(&from, 16, &target);
        libvirt.virsh(&["vol-create-from", "pool", &file, &plain, "--inputpool", "pool"]);
        libvirt.virsh(&["vol-clone", &from, &clone, "--pool", "pool"]);
        libvirt.virsh(&["vol-resize", &new, "32M", "--pool", "pool"]);
        let (driver, key) = match format {
            "raw" => ("luks", "key-secret"),
            _ => ("qcow2", "encrypt.key-secret"),
        };
        for name in [&from, &clone] {
            let image = format!("driver={driver},{key}=s,file.filename={}", libvirt.in_pool(name));
            let plain = format!("driver={format},file.filename={}", libvirt.in_pool(&plain));
            let secret = ["--object", "secret,id=s,data=open sesame"];
            let compare = [&["compare", "-q", "--image-opts"][..], &secret, &[&image, &plain]];
            stage.qemu("qemu-img", &compare.concat());
        }
        stage.has_size(&libvirt.in_pool(&new), driver, 32 * MIB);
    }
    for words in [
        ["create -f luks --object secret,", "new.raw"],
        ["create -f qcow2 --object secret,", "encrypt.format=luks"],
        ["convert --image-opts -n --target-image-opts --object secret,", "driver=luks"],
        ["resize --object secret,", "driver=qcow2,encrypt.key-secret="],
    ] {
        stage.assert_called(&words);
    }
}
