//! The images that the cases work on.

use std::path::Path;
use std::process::Command;

/// Runs a program of QEMU in a folder.
///
/// # Panics
/// It fails.
fn must(program: &Path, folder: &Path, line: &str) {
    let done = Command::new(program)
        .args(line.split(' '))
        .current_dir(folder)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
}

/// The commands of `qemu-img` that make the images.
const MAKE: &[&str] = &[
    "create -q -f raw empty.raw 1M",
    "create -q -f raw full.raw 1M",
    "create -q -f qcow2 a.qcow2 4M",
    "create -q -f qcow2 plain.qcow2 4M",
    "create -q -f qcow2 -o compat=0.10 v2.qcow2 4M",
    "create -q -f qcow2 -o cluster_size=4k,refcount_bits=1 small.qcow2 4M",
    "create -q -f qcow2 -o extended_l2=on,cluster_size=16k,lazy_refcounts=on sub.qcow2 4M",
    "create -q -f qcow2 -o preallocation=metadata pre.qcow2 4M",
    "create -q -f qcow2 -o data_file=ext.data,data_file_raw=on ext.qcow2 4M",
    "create -q -f qcow2 -o cluster_size=512,refcount_bits=64 tiny.qcow2 1M",
    "create -q -f qcow2 -o cluster_size=2M big.qcow2 8M",
    "create -q -f vdi a.vdi 4M",
    "create -q -f vdi -o static=on static.vdi 2M",
    "create -q -f vpc a.vpc 4M",
    "create -q -f vpc -o subformat=fixed fixed.vpc 4M",
    "create -q -f vpc -o force_size=on sized.vpc 4M",
    "create -q -f vhdx a.vhdx 4M",
    "create -q -f vhdx -o subformat=fixed,block_size=1M fixed.vhdx 2M",
    "create -q -f vmdk a.vmdk 4M",
    "create -q -f vmdk -o subformat=twoGbMaxExtentFlat flat.vmdk 4M",
    "create -q -f vmdk -o subformat=monolithicFlat one.vmdk 2M",
    "create -q -f vmdk -o subformat=twoGbMaxExtentSparse two.vmdk 2M",
    "create -q -f vmdk -o adapter_type=lsilogic,compat6=on lsi.vmdk 2M",
    "create -q -f qcow a.qcow 4M",
    "create -q -f qed a.qed 4M",
    "create -q -f parallels a.parallels 4M",
    "create -q -f luks --object secret,id=s,data=abc -o key-secret=s,iter-time=10 a.luks 1M",
    "create -q -f qcow2 --object secret,id=s,data=abc -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 enc.qcow2 1M",
];

/// Images that get data.
const WRITTEN: &[(&str, &str)] = &[
    ("raw", "full.raw"),
    ("qcow2", "a.qcow2"),
    ("qcow2", "plain.qcow2"),
    ("qcow2", "v2.qcow2"),
    ("qcow2", "small.qcow2"),
    ("qcow2", "sub.qcow2"),
    ("qcow2", "ext.qcow2"),
    ("qcow2", "tiny.qcow2"),
    ("qcow2", "big.qcow2"),
    ("vdi", "static.vdi"),
    ("vpc", "sized.vpc"),
    ("vhdx", "fixed.vhdx"),
    ("vmdk", "one.vmdk"),
    ("vmdk", "two.vmdk"),
    ("vmdk", "lsi.vmdk"),
    ("vdi", "a.vdi"),
    ("vpc", "a.vpc"),
    ("vhdx", "a.vhdx"),
    ("vmdk", "a.vmdk"),
    ("qcow", "a.qcow"),
    ("qed", "a.qed"),
    ("parallels", "a.parallels"),
];

/// The commands that follow once there is data.
const FINISH: &[&str] = &[
    "snapshot -c first a.qcow2",
    "bitmap --add a.qcow2 changes",
    "bitmap --add --disable -g 128k a.qcow2 off",
    "convert -q -c -O qcow2 -o compression_type=zstd full.raw zstd.qcow2",
    "convert -q -c -O qcow2 full.raw zlib.qcow2",
    "convert -q -O vmdk -o subformat=streamOptimized full.raw stream.vmdk",
    "create -q -f qcow2 -b a.qcow2 -F qcow2 mid.qcow2",
    "create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2",
    "create -q -f qcow2 -b full.raw -F raw onraw.qcow2 2M",
];

/// Rules of `blkdebug`.
const RULES: &[(&str, &str)] = &[
    ("read.rules", "[inject-error]\nevent = \"read_aio\"\nerrno = \"5\"\n"),
    (
        "write.rules",
        "# once\n[inject-error]\nevent = \"write_aio\"\nerrno = \"28\"\nonce = \"on\"\n",
    ),
    ("sector.rules", "[inject-error]\nevent = \"read_aio\"\nerrno = \"5\"\nsector = \"130\"\n"),
    ("l2.rules", "[inject-error]\nevent = \"l2_load\"\nerrno = \"5\"\n"),
    (
        "flush.rules",
        "[inject-error]\nevent = \"flush_to_disk\"\nerrno = \"5\"\niotype = \"flush\"\n",
    ),
    ("any.rules", "[inject-error]\nevent = \"none\"\nerrno = \"5\"\niotype = \"read\"\n"),
    ("bad.rules", "[inject-error]\nevent = \"no_such_event\"\n"),
    (
        "states.rules",
        "[set-state]\nevent = \"read_aio\"\nstate = \"1\"\nnew_state = \"2\"\n\n[inject-error]\n\
         event = \"read_aio\"\nstate = \"2\"\nerrno = \"28\"\nonce = \"on\"\n",
    ),
];

/// Makes all images in a folder.
///
/// # Panics
/// The reference fails.
pub fn make(reference: &Path, folder: &Path) {
    for line in MAKE {
        must(reference, folder, line);
    }
    let io = reference.with_file_name("qemu-io");
    let write = |format: &str, name: &str, command: &str| {
        let done = Command::new(&io)
            .args(["-f", format, "-c", command, name])
            .current_dir(folder)
            .output()
            .unwrap_or_else(|error| panic!("qemu-io: {error}"));
        assert!(done.status.success(), "{name}: {done:?}");
    };
    for (format, name) in WRITTEN {
        write(format, name, "write -P 17 64k 192k");
        write(format, name, "write -P 18 512k 4k");
    }
    for line in FINISH {
        must(reference, folder, line);
    }
    write("qcow2", "mid.qcow2", "write -P 33 1M 64k");
    write("qcow2", "top.qcow2", "write -z 64k 64k");
    for (name, rules) in RULES {
        std::fs::write(folder.join(name), rules).expect("a scratch folder");
    }
    std::fs::write(folder.join("text"), "no image\n").expect("a scratch folder");
    std::fs::write(folder.join("nothing"), "").expect("a scratch folder");
    let whole = std::fs::read(folder.join("a.qcow2")).expect("was made");
    std::fs::write(folder.join("cut.qcow2"), &whole[..whole.len() / 2]).expect("a scratch folder");
    for (name, flags) in [("dirty.qcow2", 1), ("corrupt.qcow2", 2), ("unknown.qcow2", 1 << 7)] {
        let mut marked = whole.clone();
        // The lowest byte of the header's incompatible features.
        marked[79] |= flags;
        std::fs::write(folder.join(name), marked).expect("a scratch folder");
    }
    let plain = std::fs::read(folder.join("plain.qcow2")).expect("was made");
    for (name, damaged) in damaged(&plain) {
        std::fs::write(folder.join(name), damaged).expect("a scratch folder");
    }
    let mut leaky = whole;
    // One more cluster than anything refers to, with a refcount: the file's last entry plus one.
    let clusters = leaky.len().div_ceil(65536);
    leaky.resize((clusters + 1) * 65536, 0);
    leaky[2 * 65536 + clusters * 2 + 1] = 1;
    std::fs::write(folder.join("leak.qcow2"), leaky).expect("a scratch folder");
}

/// Images with wrong refcounts and COPIED flags, out of one without snapshots.
fn damaged(whole: &[u8]) -> [(&'static str, Vec<u8>); 4] {
    let word = |at: usize| {
        let bytes: [u8; 8] = whole[at..at + 8].try_into().expect("eight bytes");
        (u64::from_be_bytes(bytes) & 0x00ff_ffff_ffff_fe00) as usize
    };
    // The first refcount block, and the L2 entry of the second cluster, which has data.
    let (block, table) = (word(word(48)), word(word(40)));
    let entry = table + 8;
    let refcount_of = |offset: usize| block + offset / 65536 * 2 + 1;
    let with = |at: usize, byte: u8| {
        let mut image = whole.to_vec();
        image[at] = byte;
        image
    };
    [
        ("data0.qcow2", with(refcount_of(word(entry)), 0)),
        ("data9.qcow2", with(refcount_of(word(entry)), 9)),
        ("table0.qcow2", with(refcount_of(table), 0)),
        ("flag.qcow2", with(entry, whole[entry] ^ 0x80)),
    ]
}
