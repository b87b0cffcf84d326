//! Each reason to refuse an image, with an example image.

mod images;

use std::sync::Arc;
use std::time::Duration;

use images::*;
use vdkit_block::Storage;
use vdkit_inspect::{Allow, Code, Depth, InspectOptions, InspectReport, Verdict, Weight, inspect};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, FaultKind, FaultPlan, FaultyStorage, Rng};

fn judge_with(bytes: &[u8], options: &InspectOptions) -> InspectReport {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", bytes).read_only());
    inspect(storage, options).unwrap()
}

fn judge(bytes: &[u8]) -> InspectReport {
    judge_with(bytes, &InspectOptions::default())
}

fn codes(report: &InspectReport) -> Vec<Code> {
    report.findings.iter().map(|finding| finding.code).collect()
}

/// Codes tested with the command, because they need a process.
const OF_PROCESSES: &[Code] = &[
    Code::NotJudged,
    Code::LimitMemory,
    Code::InspectorDied,
    Code::InspectorForbidden,
    Code::InspectorAnswer,
    Code::SandboxPartial,
];

/// An image for each code, with the options for it.
fn cases() -> Vec<(Code, Vec<u8>, InspectOptions)> {
    let usual = InspectOptions::default;
    let plain: Vec<(Code, Vec<u8>)> = vec![
        (Code::BackingFile, backed("base.qcow2")),
        (Code::BackingFormat, backed("base.qcow2")),
        (Code::DataFile, patched(72, &4u64.to_be_bytes())),
        (Code::ReferenceJson, backed("json:{\"driver\":\"nbd\"}")),
        (Code::ReferenceProtocol, backed("nbd://host/x")),
        (Code::ReferenceAbsolute, backed("/etc/shadow")),
        (Code::ReferenceParent, backed("../secret")),
        (Code::ReferenceExtent, descriptor("RW 10 FLAT \"other.vmdk\" 0", "monolithicFlat")),
        (Code::ParentImage, vmdk(&text("RW 10 SPARSE \"x.vmdk\"", "monolithicSparse", "1234"))),
        (Code::SeveralFormats, patched(510, b"\x55\xaa")),
        (Code::FormatBanned, start(b"QED\0", 4096)),
        (Code::NotADisk, start(b"\x1f\x8b\x08", 4096)),
        (Code::NestedFormat, qcow2_holding(&qcow2()[..512])),
        (Code::Empty, Vec::new()),
        (Code::RawByElimination, vec![0; 4096]),
        (Code::HybridIso, with(mbr(0x80, 0x17, 1, 10, 1 << 20), 32769, b"CD001")),
        (Code::UnknownVersion, patched(4, &4u32.to_be_bytes())),
        (Code::UnknownIncompatible, patched(72, &(1u64 << 5).to_be_bytes())),
        (Code::UnknownCompatible, patched(80, &(1u64 << 40).to_be_bytes())),
        (Code::UnknownAutoclear, patched(88, &(1u64 << 63).to_be_bytes())),
        (Code::ExtendedL2, qcow2_with("extended_l2=on", 1 << 20, &[])),
        (Code::UnknownExtension, with_extension(0x1234_5678, b"anything")),
        (Code::DuplicateExtension, with_extension(0x6803_f857, &[0; 48])),
        (Code::HeaderPadding, patched(40_000, b"hidden")),
        (Code::HeaderTruncated, qcow2()[..90].to_vec()),
        (Code::HeaderInvalid, patched(20, &30u32.to_be_bytes())),
        (Code::VirtualSize, patched(24, &(1u64 << 60).to_be_bytes())),
        (Code::TableTooLarge, patched(36, &u32::MAX.to_be_bytes())),
        (Code::Expansion, bomb()),
        (Code::OutsideFile, leading_outside()),
        (Code::MarkedCorrupt, patched(72, &2u64.to_be_bytes())),
        (Code::NotClosed, patched(72, &1u64.to_be_bytes())),
        (Code::MetadataCorrupt, aliased()),
        (Code::UnreferencedSpace, leaking()),
        (Code::Encrypted, patched(32, &2u32.to_be_bytes())),
        (Code::InternalSnapshots, with_snapshot(0)),
        (Code::VmState, with_snapshot(4096)),
        (Code::Bitmaps, with_extension(0x2385_2875, &bitmaps_extension())),
        (Code::VmdkCreateType, vmdk(&text("RW 10 SPARSE \"x\"", "vmfsSparse", "ffffffff"))),
        (Code::VmdkDescriptor, vmdk("no line that is known\n")),
        (Code::VhdFooterCopy, with(vhd_dynamic(3), 0, &[0; 512])),
        (Code::VmdkFooter, vmdk_at_end(false)),
        (Code::MbrBootFlag, mbr(0x13, 0x83, 1, 10, 1 << 20)),
        (Code::MbrNoPartition, mbr(0, 0, 0, 0, 1 << 20)),
        (Code::MbrProtective, mbr(0, 0xee, 1, 10, 1 << 20)),
        (Code::PartitionBeyondEnd, mbr(0, 0x83, 1, 1 << 20, 1 << 20)),
        (Code::ContentsNotChecked, vdi(1)),
    ];
    let mut cases: Vec<_> = plain.into_iter().map(|(c, bytes)| (c, bytes, usual())).collect();
    let raw = options_with(|options| options.format = Some("raw".to_owned()));
    cases.push((Code::FormatMismatch, qcow2(), raw));
    cases.push((
        Code::LimitReads,
        qcow2(),
        options_with(|options| options.read_bytes_max = 70_000),
    ));
    cases.push((
        Code::LimitTime,
        qcow2(),
        options_with(|options| options.time_max = Duration::ZERO),
    ));
    cases
}

/// The usual options, with a change.
fn options_with(change: impl FnOnce(&mut InspectOptions)) -> InspectOptions {
    let mut options = InspectOptions::default();
    change(&mut options);
    options
}

#[test]
fn each_code_is_found_in_an_image_that_has_it() {
    let cases = cases();
    for (code, bytes, options) in &cases {
        let report = judge_with(bytes, options);
        let finding = report.findings.iter().find(|finding| finding.code == *code);
        let Some(finding) = finding else { panic!("{}: {report:#?}", code.name()) };
        assert_eq!(finding.severity, code.weight(), "{}", code.name());
        let refused = report.findings.iter().any(|f| f.severity == Weight::Refuse);
        let verdict = if refused { Verdict::Refuse } else { Verdict::Accept };
        assert_eq!(report.verdict, verdict, "{}", code.name());
        if code.weight() == Weight::Refuse {
            assert_eq!(report.verdict, Verdict::Refuse, "{}", code.name());
            assert!(!finding.mend.is_empty(), "{}", code.name());
        }
    }
    for code in Code::ALL {
        let shown = cases.iter().any(|case| case.0 == *code) || OF_PROCESSES.contains(code);
        assert!(shown, "{} has no image", code.name());
    }
}

#[test]
fn what_is_alone_in_an_image_is_found_alone() {
    // These are accepted without findings.
    for (name, bytes) in [
        ("qcow2", qcow2()),
        ("version 2", qcow2_with("compat=0.10", 1 << 20, &[7; 9000])),
        ("zstd", qcow2_with("compression_type=zstd", 1 << 20, &[7; 9000])),
        ("2 MiB clusters", qcow2_with("cluster_size=2M", 1 << 20, &[7; 9000])),
        ("512-byte clusters", qcow2_with("cluster_size=512", 1 << 20, &[7; 9000])),
        ("lazy", qcow2_with("lazy_refcounts=on", 1 << 20, &[7; 9000])),
        ("MBR", mbr(0x80, 0x83, 1, 100, 1 << 20)),
        ("GPT", gpt(1 << 20)),
    ] {
        let report = judge(&bytes);
        assert!(report.findings.is_empty(), "{name}: {report:#?}");
        assert_eq!((report.verdict, report.depth), (Verdict::Accept, Depth::Metadata), "{name}");
    }
    for (code, bytes) in [
        (Code::BackingFile, with_backing_format(backed("base.qcow2"))),
        (Code::UnknownIncompatible, patched(72, &(1u64 << 63).to_be_bytes())),
        (Code::HeaderPadding, patched(65_535, b"x")),
        (Code::HeaderPadding, patched(106, b"x")),
        (Code::UnreferencedSpace, leaking()),
        (Code::Encrypted, start(b"LUKS\xba\xbe\0\x01", 1 << 20)),
        (Code::NestedFormat, qcow2_holding(&vdi(1))),
        (Code::FormatBanned, start(b"QFI\xfb\0\0\0\x01", 4096)),
    ] {
        assert_eq!(codes(&judge(&bytes)), [code], "{}", code.name());
    }
}

#[test]
fn two_formats_at_once_are_refused_whichever_they_are() {
    let len = qcow2().len();
    let footed = {
        let mut image = qcow2();
        image.extend(vhd_footer(2, 1 << 20, 0));
        image
    };
    for (name, image) in [
        ("MBR", patched(510, b"\x55\xaa")),
        ("GPT", patched(512, b"EFI PART")),
        ("ISO", patched(32769, b"CD001")),
        ("UDF", patched(34817, b"NSR02")),
        ("VDI", patched(64, &0xbeda_107f_u32.to_le_bytes())),
        ("VMDK descriptor", patched(2048, b"# Disk DescriptorFile\n")),
        ("VHD", footed),
        ("zip", with(qcow2(), len - 22, b"PK\x05\x06")),
        ("raw LUKS and MBR", with(start(b"LUKS\xba\xbe\0\x01", 1 << 20), 510, b"\x55\xaa")),
        ("VMDK and ISO", with(vmdk(&sound_text()), 32769, b"CD001")),
        ("VHDX and MBR", with(vhdx(false, 1 << 20), 510, b"\x55\xaa")),
        ("tar and MBR", with(mbr(0, 0x83, 1, 10, 1 << 20), 257, b"ustar")),
    ] {
        let report = judge(&image);
        assert!(codes(&report).contains(&Code::SeveralFormats), "{name}: {report:#?}");
        assert_eq!(report.verdict, Verdict::Refuse, "{name}");
        assert!(report.formats.len() >= 2, "{name}: {report:#?}");
    }
    // A fixed VHD is a raw disk and a footer, so a partition table is no second format.
    let mut fixed = mbr(0x80, 0x83, 1, 100, 1 << 20);
    fixed.extend(vhd_footer(2, 1 << 20, u64::MAX));
    let report = judge(&fixed);
    assert_eq!((report.format.as_str(), report.verdict), ("vhd", Verdict::Accept), "{report:#?}");
}

#[test]
fn headers_of_other_formats_are_read_as_far_as_it_is_safe() {
    for (name, image, size) in [
        ("vmdk", vmdk(&sound_text()), 10 * 512),
        ("vmdk", vmdk_at_end(true), 10 * 512),
        ("vdi", vdi(1), 1 << 20),
        ("vhd", vhd_dynamic(3), 1 << 20),
        ("vhdx", vhdx(false, 1 << 20), 1 << 20),
    ] {
        let report = judge(&image);
        assert_eq!(codes(&report), [Code::ContentsNotChecked], "{name}: {report:#?}");
        assert_eq!(report.format, name);
        assert_eq!((report.virtual_size, report.depth), (Some(size), Depth::Header), "{name}");
    }
    for (name, image) in [
        ("vdi", vdi(4)),
        ("vdi link", with(vdi(1), 0x1a8, b"parent")),
        ("vhd", vhd_dynamic(4)),
        ("vhdx", vhdx(true, 1 << 20)),
    ] {
        assert!(codes(&judge(&image)).contains(&Code::ParentImage), "{name}");
    }
    for (name, image) in [
        ("vmdk", with(vmdk(&sound_text()), 12, &(1u64 << 52).to_le_bytes())),
        ("vdi", with(vdi(1), 0x170, &(1u64 << 60).to_le_bytes())),
        ("vhd", with(vhd_dynamic(3), 48, &(1u64 << 60).to_be_bytes())),
        ("vhdx", vhdx(false, 1 << 60)),
    ] {
        assert!(codes(&judge(&image)).contains(&Code::VirtualSize), "{name}");
    }
    // Tables outside the file, descriptors with hidden content.
    let outside = judge(&with(vdi(1), 0x180, &u32::MAX.to_le_bytes()));
    assert!(codes(&outside).contains(&Code::OutsideFile), "{outside:#?}");
    for (at, bytes) in [(12, [0; 8]), (28, [9; 8]), (36, [0; 8])] {
        let report = judge(&with(vmdk(&sound_text()), at, &bytes));
        assert!(codes(&report).contains(&Code::VmdkDescriptor), "byte {at}: {report:#?}");
    }
    for line in ["encoding = \"UTF-8\"\n", "comment=\u{e4}\n"] {
        let report = judge(&vmdk(&(sound_text() + line)));
        assert!(codes(&report).contains(&Code::VmdkDescriptor), "{line}: {report:#?}");
    }
    let hidden = judge(&with(vmdk(&sound_text()), 512 + 1000, b"hidden"));
    assert!(codes(&hidden).contains(&Code::VmdkDescriptor), "{hidden:#?}");
    for line in [
        "RW 10 SPARSE \"/etc/shadow\"",
        "RW 10 SPARSE \"../x.vmdk\"",
        "RW 10 FLAT \"x\" 0",
        "RW 10 SPARSE \"a\"\nRW 10 SPARSE \"b\"",
    ] {
        let report = judge(&vmdk(&text(line, "monolithicSparse", "ffffffff")));
        assert!(codes(&report).contains(&Code::ReferenceExtent), "{line}: {report:#?}");
    }
}

#[test]
fn a_policy_lets_pass_what_it_names_and_nothing_else() {
    let allowing = |what| options_with(|options| options.allow = vec![what]);
    for (what, code, image) in [
        (Allow::Backing, Code::BackingFile, backed("base.qcow2")),
        (Allow::Encryption, Code::Encrypted, start(b"LUKS\xba\xbe\0\x01", 1 << 20)),
        (Allow::ExtendedL2, Code::ExtendedL2, qcow2_with("extended_l2=on", 1 << 20, &[7; 9000])),
        (Allow::Nested, Code::NestedFormat, qcow2_holding(&vdi(1))),
    ] {
        let report = judge_with(&image, &allowing(what));
        let finding = report.findings.iter().find(|f| f.code == code).unwrap();
        assert_eq!(finding.severity, Weight::Note, "{report:#?}");
        assert_eq!(report.verdict, Verdict::Accept, "{report:#?}");
        for other in [Allow::Snapshots, Allow::DataFile] {
            assert_eq!(judge_with(&image, &allowing(other)).verdict, Verdict::Refuse);
        }
    }
    for name in ["/etc/shadow", "../x", "json:{}", "nbd:x"] {
        let report = judge_with(&backed(name), &allowing(Allow::Backing));
        assert_eq!(report.verdict, Verdict::Refuse, "{name}");
    }
    let strict = options_with(|options| options.strict = true);
    assert_eq!(judge(&leaking()).verdict, Verdict::Accept);
    assert_eq!(judge_with(&leaking(), &strict).verdict, Verdict::Refuse);
    let sized = |size_max| options_with(|options| options.size_max = size_max);
    assert_eq!(judge_with(&qcow2(), &sized(1 << 20)).verdict, Verdict::Accept);
    assert_eq!(judge_with(&qcow2(), &sized((1 << 20) - 1)).verdict, Verdict::Refuse);
    let lax = options_with(|options| options.ratio_max = 1 << 40);
    assert!(!codes(&judge_with(&bomb(), &lax)).contains(&Code::Expansion));
}

#[test]
fn the_expected_format_is_the_one_that_it_must_have() {
    let expecting = |f: &str| options_with(|options| options.format = Some(f.to_owned()));
    let iso = with(vec![0; 64 << 10], 32769, b"CD001");
    let disk = mbr(0x80, 0x83, 1, 100, 1 << 20);
    let hybrid = with(disk.clone(), 32769, b"CD001");
    for (image, fits, other) in [
        (&qcow2(), &["qcow2"][..], &["raw", "vmdk", "mbr"][..]),
        (&vdi(1), &["vdi"], &["raw", "qcow2"]),
        (&iso, &["iso"], &["raw", "qcow2", "mbr"]),
        (&hybrid, &["iso"], &["raw", "qcow2", "gpt"]),
        (&disk, &["mbr", "raw"], &["gpt", "qcow2", "vhd"]),
    ] {
        for format in fits {
            assert_eq!(judge_with(image, &expecting(format)).verdict, Verdict::Accept, "{format}");
        }
        for format in other {
            let report = judge_with(image, &expecting(format));
            assert!(codes(&report).contains(&Code::FormatMismatch), "{format}: {report:#?}");
        }
    }
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &qcow2()));
    assert!(inspect(storage, &expecting("no-such")).is_err());
}

/// Programs that expect the footer copy at offset 0 see a raw disk without it.
#[test]
fn a_dynamic_vhd_without_its_footer_at_the_start_is_refused() {
    let sound = vhd_dynamic(3);
    let mut other_size = sound.clone();
    other_size[48..56].copy_from_slice(&(2u64 << 20).to_be_bytes());
    sum_up_vhd(&mut other_size);
    for (name, image) in [
        ("zeroes", with(sound.clone(), 0, &[0; 512])),
        ("a partition table", with(mbr(0x80, 0x83, 1, 10, 8192), 512, &sound[512..])),
        ("no signature", with(sound.clone(), 0, b"conectiX")),
        ("a changed byte", with(sound.clone(), 100, b"x")),
        ("another size", other_size),
        ("a differencing one", with(vhd_dynamic(4), 0, &[0; 512])),
        ("a fixed one with a footer too many", {
            let mut fixed = with(vec![0; 8192], 0, &vhd_footer(3, 1 << 20, 512));
            fixed.extend(vhd_footer(2, 8192, u64::MAX));
            fixed
        }),
    ] {
        let report = judge(&image);
        assert!(codes(&report).contains(&Code::VhdFooterCopy), "{name}: {report:#?}");
        assert_eq!(report.verdict, Verdict::Refuse, "{name}");
    }
    assert!(!codes(&judge(&sound)).contains(&Code::VhdFooterCopy));
}

#[test]
fn reads_are_few_and_counted() {
    for (name, image, reads) in [
        ("raw", vec![0; 1 << 20], 2),
        ("vdi", vdi(1), 2),
        ("vmdk", vmdk(&sound_text()), 3),
        ("vhd", vhd_dynamic(3), 3),
        ("vhdx", vhdx(false, 1 << 20), 6),
        ("qed", start(b"QED\0", 4096), 2),
        ("qcow2", qcow2(), 16),
    ] {
        let storage = CountingStorage::new(Arc::new(MemoryStorage::from_bytes("image", &image)));
        let report = inspect(storage.clone(), &InspectOptions::default()).unwrap();
        let counts = storage.counts();
        assert!(counts.reads <= reads, "{name}: {} reads", counts.reads);
        assert_eq!(report.reads, counts.reads, "{name}");
        assert_eq!(report.read_bytes, counts.bytes_read, "{name}");
        assert_eq!((counts.writes, counts.zeroes, counts.discards, counts.set_lens), (0, 0, 0, 0));
    }
}

#[test]
fn a_failed_read_is_no_verdict() {
    for nth in 0..8 {
        let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &qcow2()));
        let storage = FaultyStorage::new(memory);
        storage.arm(FaultPlan::nth(&[FaultKind::Read], nth));
        assert!(inspect(storage.clone(), &InspectOptions::default()).is_err(), "read {nth}");
        assert_eq!(storage.fired(), 1, "read {nth}");
    }
}

#[test]
fn mutilated_images_get_an_answer() {
    let seeds: Vec<Vec<u8>> = cases().into_iter().map(|case| case.1).collect();
    let options = options_with(|options| options.memory_max = 32 << 20);
    let mut rng = Rng::new(1);
    for round in 0..600 {
        let mut image = seeds[round % seeds.len()].clone();
        if image.is_empty() {
            continue;
        }
        for _ in 0..1 + rng.below(6) {
            let span = if rng.below(2) == 0 { 200 } else { image.len() as u64 };
            let at = rng.below(span.min(image.len() as u64)) as usize;
            image[at] = rng.below(256) as u8;
        }
        if rng.below(4) == 0 {
            image.truncate(rng.below(image.len() as u64) as usize);
        }
        let report = judge_with(&image, &options);
        assert_eq!(report.verdict, InspectReport::verdict_of(&report.findings, false));
        assert!(report.findings.len() <= 100);
    }
}

#[test]
fn the_corpus_of_hostile_images_gets_an_answer() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dev/fuzz/corpus/qcow2_open_read");
    let mut refused = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let report = judge(&std::fs::read(entry.unwrap().path()).unwrap());
        refused += usize::from(report.verdict == Verdict::Refuse);
    }
    assert!(refused >= 5, "{refused}");
}
