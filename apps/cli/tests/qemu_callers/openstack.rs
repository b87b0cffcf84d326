//! oslo.utils, with which OpenStack's services read `qemu-img info` and inspect uploaded images.

use vdkit_testkit::{python, require_peer};

use crate::{Stage, said};

/// Prints for each image what both programs' answers say, whether they agree, and what the inspector
/// finds in the image.
const SCRIPT: &str = r#"
import subprocess, sys
from oslo_utils.imageutils import QemuImgInfo, format_inspector

for name in sys.argv[2:]:
    ours, theirs = (
        QemuImgInfo(subprocess.check_output([program, "info", "--output=json", name]))
        for program in ("bin/qemu-img", sys.argv[1])
    )
    assert str(ours) == str(theirs), f"{name}:\n{ours}\n--\n{theirs}"
    found = format_inspector.detect_file_format(name)
    try:
        found.safety_check()
        safe = "safe"
    except format_inspector.SafetyCheckFailed as failed:
        safe = "unsafe:" + ",".join(failed.failures)
    size = "size" if found.virtual_size == ours.virtual_size else "othersize"
    print(name, ours.file_format, str(found), size, safe)
"#;

#[test]
fn oslo_utils_reads_our_answers_and_finds_our_images_safe() {
    if !require_peer("qemu-img") {
        return;
    }
    // `format_inspector` needs this module, and oslo.utils does not bring it.
    let (Some(mut python), Some(_)) = (python("oslo_utils"), python("cryptography")) else {
        return;
    };
    let stage = Stage::new();
    let secret = "--object secret,id=s,data=xy";
    for line in [
        "-f qcow2 a.qcow2 64M",
        "-f qcow2 -b a.qcow2 -F qcow2 over.qcow2",
        "-f raw a.raw 64M",
        "-f vmdk a.vmdk 64M",
        "-f vmdk -o subformat=streamOptimized stream.vmdk 64M",
        "-f vdi a.vdi 64M",
        "-f vpc a.vpc 64M",
        "-f vhdx a.vhdx 64M",
        &format!("{secret} -f luks -o key-secret=s,iter-time=10 a.luks 16M"),
        &format!(
            "{secret} -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 e.qcow2 16M"
        ),
    ] {
        let arguments: Vec<_> = "create -q".split(' ').chain(line.split(' ')).collect();
        stage.run("qemu-img", &arguments);
    }
    stage.run("qemu-img", &["snapshot", "-c", "first", "a.qcow2"]);
    let qemu = said({
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "command -v qemu-img"]);
        command
    });
    python.args(["-c", SCRIPT, qemu.trim()]).current_dir(stage.path(""));
    python.args(["a.qcow2", "over.qcow2", "a.raw", "a.vmdk", "stream.vmdk", "a.vdi", "a.vpc"]);
    python.args(["a.vhdx", "a.luks", "e.qcow2"]);
    let found = said(python);
    for line in [
        "a.qcow2 qcow2 qcow2 size safe",
        "over.qcow2 qcow2 qcow2 size unsafe:backing_file",
        // A sparse file of zeroes: the inspector has read as much of it as it needs.
        "a.raw raw raw othersize safe",
        "a.vmdk vmdk vmdk size safe",
        "stream.vmdk vmdk vmdk size safe",
        "a.vdi vdi vdi size safe",
        "a.vpc vpc vhd size safe",
        "a.vhdx vhdx vhdx size safe",
        // The inspector takes what it has read of the file for its length.
        "a.luks luks luks othersize safe",
        "e.qcow2 qcow2 qcow2 size safe",
    ] {
        assert!(found.lines().any(|found| found == line), "{line}:\n{found}");
    }
    stage.assert_called(&["qemu-img info --output=json over.qcow2"]);
}
