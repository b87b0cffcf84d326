//! The command lines.

use crate::lines::{
    AROUND, GRAPHS, KEYS, LOST_AND_ZERO, MADE, NAMES, ON_RARE, RARE, SEQUENCES, WRONG,
};

/// Command lines that are run one after the other in one folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// What kind of case it is.
    pub kind: Kind,
    /// The arguments of each command, the subcommand first.
    pub commands: Vec<Vec<String>>,
    /// What is around them.
    pub around: Around,
}

/// What is around the commands of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Around {
    /// Nothing.
    #[default]
    Nothing,
    /// A process of the reference holds this qcow2 image open for writing.
    Writer(&'static str),
    /// A process of the reference holds this qcow2 image open for reading.
    Reader(&'static str),
    /// They are run by a user who may only read the folder and its images. Needs root.
    Stranger,
    /// The folder is on a file system of 2 MiB. Needs root.
    Small,
}

/// Kinds of cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// One subcommand on one image, without options.
    Plain,
    /// One option.
    Single,
    /// One option in another spelling.
    Spelling,
    /// Two options.
    Pair,
    /// A wrong command line.
    Wrong,
    /// Names of images.
    Name,
    /// Several commands in turn.
    Sequence,
}

impl Case {
    fn new(kind: Kind, commands: &[&str]) -> Self {
        let words = |line: &&str| line.split(' ').map(|word| word.replace('~', " ")).collect();
        let around = Around::Nothing;
        Self { kind, commands: commands.iter().map(words).collect(), around }
    }

    /// The subcommand of the first command.
    pub fn subcommand(&self) -> &str {
        self.commands.first().and_then(|words| words.first()).map_or("", String::as_str)
    }

    /// Whether a word stands in any of its commands.
    pub fn has(&self, word: &str) -> bool {
        self.commands.iter().flatten().any(|other| other == word)
    }

    /// Whether any of its words contains a text.
    pub fn mentions(&self, text: &str) -> bool {
        self.commands.iter().flatten().any(|other| other.contains(text))
    }

    /// The commands as a user would type them.
    pub fn line(&self) -> String {
        let quoted = |word: &String| match word.contains([' ', '"', '{', '*']) || word.is_empty() {
            true => format!("'{word}'"),
            false => word.clone(),
        };
        let commands = self.commands.iter();
        let commands = commands.map(|words| {
            format!("qemu-img {}", words.iter().map(quoted).collect::<Vec<_>>().join(" "))
        });
        let line = commands.collect::<Vec<_>>().join("; ");
        match self.around {
            Around::Nothing => line,
            around => format!("{line} ({around:?})"),
        }
    }
}

/// An option as the cases use it.
struct Opt {
    short: &'static str,
    long: &'static str,
    /// Values to try; none if it takes no value.
    values: &'static [&'static str],
}

const fn flag(short: &'static str, long: &'static str) -> Opt {
    Opt { short, long, values: &[] }
}

const fn valued(short: &'static str, long: &'static str, values: &'static [&'static str]) -> Opt {
    Opt { short, long, values }
}

/// A subcommand: its options, and the operands to which each is applied.
struct Sub {
    name: &'static str,
    options: &'static [Opt],
    operands: &'static [&'static str],
}

const CACHES: &[&str] = &["writeback", "unsafe", "bad"];
const ALL: &[&str] = &[
    "empty.raw",
    "full.raw",
    "a.qcow2",
    "v2.qcow2",
    "small.qcow2",
    "sub.qcow2",
    "pre.qcow2",
    "ext.qcow2",
    "zstd.qcow2",
    "zlib.qcow2",
    "top.qcow2",
    "onraw.qcow2",
    "a.vdi",
    "a.vpc",
    "fixed.vpc",
    "a.vhdx",
    "a.vmdk",
    "flat.vmdk",
    "a.qcow",
    "a.qed",
    "a.parallels",
    "a.luks",
    "enc.qcow2",
    "text",
    "nothing",
    "cut.qcow2",
    "leak.qcow2",
    "missing",
    ".",
];
const FORMATS: &[&str] = &["qcow2", "raw", "vmdk", "bad"];
const OUTPUT: Opt = valued("", "output", &["json", "human", "bad"]);
const QUIET: Opt = flag("-q", "quiet");
const SHARE: Opt = flag("-U", "force-share");
const FORMAT: Opt = valued("-f", "format", FORMATS);

const SUBCOMMANDS: &[Sub] = &[
    Sub {
        name: "info",
        options: &[FORMAT, OUTPUT, SHARE, flag("", "backing-chain")],
        operands: ALL,
    },
    Sub {
        name: "check",
        options: &[
            FORMAT,
            OUTPUT,
            SHARE,
            QUIET,
            valued("-r", "repair", &["leaks", "all", "bad"]),
            valued("-T", "cache", CACHES),
        ],
        operands: ALL,
    },
    Sub {
        name: "map",
        options: &[
            FORMAT,
            OUTPUT,
            SHARE,
            valued("", "start-offset", &["64k", "1M", "100G", "bad"]),
            valued("", "max-length", &["64k", "513", "bad"]),
        ],
        operands: ALL,
    },
    Sub {
        name: "snapshot",
        options: &[
            FORMAT,
            SHARE,
            QUIET,
            flag("-l", "list"),
            valued("-c", "create", &["new", "first"]),
            valued("-a", "apply", &["first", "1", "none"]),
            valued("-d", "delete", &["first", "none"]),
        ],
        operands: &["a.qcow2", "v2.qcow2", "full.raw", "a.vmdk", "top.qcow2", "missing"],
    },
    Sub {
        name: "measure",
        options: &[
            FORMAT,
            OUTPUT,
            SHARE,
            valued("-O", "", &["qcow2", "raw", "vmdk", "luks", "bad"]),
            valued("-o", "", &["cluster_size=4k", "bad=1", "preallocation=full"]),
            valued("-l", "", &["first", "none"]),
        ],
        operands: &["a.qcow2", "full.raw", "top.qcow2", "a.vdi", "missing"],
    },
    Sub {
        name: "compare",
        options: &[
            FORMAT,
            valued("-F", "", FORMATS),
            SHARE,
            QUIET,
            flag("-s", ""),
            flag("-p", ""),
            valued("-T", "", CACHES),
        ],
        operands: &[
            "a.qcow2 a.qcow2",
            "a.qcow2 v2.qcow2",
            "a.qcow2 full.raw",
            "empty.raw nothing",
            "a.vdi a.vmdk",
            "a.qcow2 missing",
            "a.qcow2",
            "zlib.qcow2 full.raw",
        ],
    },
    Sub {
        name: "create",
        options: &[
            FORMAT,
            QUIET,
            flag("-u", ""),
            valued("-b", "", &["a.qcow2", "full.raw", "missing"]),
            valued("-F", "", FORMATS),
            valued(
                "-o",
                "",
                &[
                    "cluster_size=4k",
                    "preallocation=metadata",
                    "size=3M",
                    "compat=0.10",
                    "help",
                    "bad=1",
                    "cluster_size=3",
                    "backing_file=a.qcow2,backing_fmt=qcow2",
                    "lazy_refcounts=on",
                    "refcount_bits=8",
                    "compression_type=zstd",
                    "extended_l2=on",
                    "data_file=d.raw",
                    "nocow=on",
                ],
            ),
        ],
        operands: &[
            "new 2M",
            "new.qcow2 1.5M",
            "new",
            "full.raw 1M",
            "new 513",
            "new bad",
            "new 2M 3M",
            "no/new 1M",
        ],
    },
    Sub {
        name: "resize",
        options: &[
            FORMAT,
            QUIET,
            flag("", "shrink"),
            valued("", "preallocation", &["off", "metadata", "falloc", "full", "bad"]),
        ],
        operands: &[
            "a.qcow2 8M",
            "a.qcow2 +1M",
            "a.qcow2 1M",
            "a.qcow2 -1M",
            "a.qcow2 4M",
            "full.raw 2M",
            "full.raw 512k",
            "v2.qcow2 8M",
            "a.qcow2 bad",
            "a.qcow2",
            "missing 1M",
            "a.vdi 8M",
            "a.vmdk 8M",
            "pre.qcow2 1M",
        ],
    },
    Sub {
        name: "convert",
        options: &[
            FORMAT,
            valued("-O", "", &["qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx", "qed", "bad"]),
            QUIET,
            flag("-c", ""),
            flag("-n", ""),
            flag("-p", ""),
            flag("-W", ""),
            flag("-C", ""),
            SHARE,
            valued("-m", "", &["4", "17", "bad"]),
            valued("-t", "", CACHES),
            valued("-T", "", CACHES),
            valued("-S", "", &["0", "4k", "1M", "bad"]),
            valued("-l", "", &["first", "snapshot.id=1", "none"]),
            valued("-B", "", &["a.qcow2", "missing"]),
            valued("-F", "", &["qcow2"]),
            valued(
                "-o",
                "",
                &["cluster_size=4k", "compat=0.10", "preallocation=metadata", "bad=1", "help"],
            ),
            flag("", "target-is-zero"),
            flag("", "salvage"),
            flag("", "bitmaps"),
            flag("", "skip-broken-bitmaps"),
            valued("-r", "", &["10M", "bad"]),
        ],
        operands: &[
            "a.qcow2 new",
            "full.raw new",
            "top.qcow2 new",
            "a.vdi new",
            "full.raw a.qcow2 new",
            "missing new",
            "a.qcow2",
        ],
    },
    Sub {
        name: "dd",
        options: &[FORMAT, valued("-O", "", &["qcow2", "raw", "bad"]), SHARE],
        operands: &[
            "if=a.qcow2 of=new",
            "if=full.raw of=new bs=4k count=3",
            "if=full.raw of=new skip=1 bs=64k",
            "if=a.qcow2",
            "of=new",
            "if=full.raw of=new bs=bad",
            "if=full.raw of=new bs=0",
            "if=full.raw of=new count=1M",
            "if=missing of=new",
            "if=full.raw of=new skip=100M",
        ],
    },
    Sub {
        name: "rebase",
        options: &[
            FORMAT,
            QUIET,
            flag("-u", ""),
            flag("-p", ""),
            flag("-c", ""),
            valued("-b", "", &["a.qcow2", "full.raw", "missing", ""]),
            valued("-F", "", FORMATS),
            valued("-t", "", CACHES),
            valued("-T", "", CACHES),
            SHARE,
        ],
        operands: &["top.qcow2", "mid.qcow2", "onraw.qcow2", "a.qcow2", "full.raw", "missing"],
    },
    Sub {
        name: "commit",
        options: &[
            FORMAT,
            QUIET,
            flag("-d", ""),
            flag("-p", ""),
            valued("-b", "", &["a.qcow2", "mid.qcow2", "missing"]),
            valued("-t", "", CACHES),
            valued("-r", "", &["10M", "bad"]),
        ],
        operands: &["top.qcow2", "mid.qcow2", "onraw.qcow2", "a.qcow2", "missing"],
    },
    Sub {
        name: "bitmap",
        options: &[
            FORMAT,
            flag("", "add"),
            flag("", "remove"),
            flag("", "clear"),
            flag("", "enable"),
            flag("", "disable"),
            valued("", "merge", &["off", "none"]),
            valued("-g", "granularity", &["64k", "128k", "3", "bad"]),
            valued("-b", "", &["a.qcow2", "missing"]),
            valued("-F", "", &["qcow2", "bad"]),
        ],
        operands: &[
            "a.qcow2 changes",
            "a.qcow2 off",
            "a.qcow2 new",
            "v2.qcow2 new",
            "full.raw new",
            "a.qcow2",
            "missing new",
        ],
    },
    Sub {
        name: "amend",
        options: &[
            FORMAT,
            QUIET,
            flag("-p", ""),
            flag("", "force"),
            valued("-t", "", CACHES),
            valued(
                "-o",
                "",
                &[
                    "compat=0.10",
                    "compat=1.1",
                    "lazy_refcounts=on",
                    "refcount_bits=64",
                    "size=8M",
                    "bad=1",
                    "help",
                    "cluster_size=4k",
                ],
            ),
        ],
        operands: &["a.qcow2", "v2.qcow2", "sub.qcow2", "full.raw", "a.vdi", "missing"],
    },
    Sub {
        name: "bench",
        options: &[
            FORMAT,
            QUIET,
            flag("-n", ""),
            flag("-w", ""),
            SHARE,
            valued("-c", "", &["100", "bad"]),
            valued("-d", "", &["1", "bad"]),
            valued("-s", "", &["512", "bad"]),
            valued("-S", "", &["1024", "bad"]),
            valued("-o", "", &["64k", "bad"]),
            valued("-t", "", CACHES),
            valued("-i", "", &["threads", "bad"]),
            valued("", "pattern", &["7", "bad"]),
            valued("", "flush-interval", &["10", "bad"]),
            flag("", "no-drain"),
        ],
        operands: &["a.qcow2", "full.raw", "missing"],
    },
];

/// Names of the debugging drivers, and commands on them. The rules' files are in `images`.
const DEBUGGING: &[&str] = &[
    "info blkdebug::a.qcow2",
    "info --output=json blkdebug:read.rules:a.qcow2",
    "info blkdebug::full.raw",
    "info -f blkdebug blkdebug::a.qcow2",
    "info blkdebug:a.qcow2",
    "info blkdebug:",
    "info blkdebug::missing",
    "info blkdebug:missing.rules:a.qcow2",
    "info blkdebug:bad.rules:a.qcow2",
    "info blkdebug:any.rules:a.qcow2",
    "check blkdebug:read.rules:a.qcow2",
    "check blkdebug:l2.rules:a.qcow2",
    "map blkdebug:read.rules:a.qcow2",
    "map --output=json blkdebug::a.qcow2",
    "map blkdebug:l2.rules:a.qcow2",
    "compare blkdebug::a.qcow2 a.qcow2",
    "compare -s blkdebug:read.rules:a.qcow2 full.raw",
    "measure -O qcow2 blkdebug::a.qcow2",
    "convert -O raw blkdebug::a.qcow2 n.raw",
    "convert -O raw blkdebug:read.rules:a.qcow2 n.raw",
    "convert -O raw blkdebug:any.rules:a.qcow2 n.raw",
    "convert -n -O qcow2 full.raw blkdebug::small.qcow2",
    "convert -n -O raw full.raw blkdebug:flush.rules:empty.raw",
    "bench -c 10 blkdebug::a.qcow2",
    "bench -c 40 blkdebug:read.rules:a.qcow2",
    "bench -c 10 -f raw blkdebug:read.rules:full.raw",
    "bench -c 10 -f raw blkdebug:states.rules:full.raw",
    "bench -w -c 10 -f raw blkdebug:states.rules:full.raw",
    "bench -w -c 10 -f raw blkdebug:write.rules:full.raw",
    "bench -w -c 10 -d 1 -f raw --flush-interval 5 blkdebug:flush.rules:full.raw",
    "bench -w -c 10 blkdebug::a.qcow2",
    "resize blkdebug::small.qcow2 +1M",
    "bench -c 10 --image-opts driver=raw,file.driver=blkdebug,file.image.driver=file,file.image.filename=full.raw,file.inject-error.0.event=read_aio,file.inject-error.0.errno=28",
    "bench -c 10 --image-opts driver=blkdebug,image.driver=file,image.filename=full.raw,inject-error.0.event=read_aio",
    "bench -c 10 --image-opts driver=raw,file.driver=blkdebug,file.config=write.rules,file.align=512,file.max-transfer=64k,file.opt-write-zero=4k,file.image.driver=file,file.image.filename=full.raw",
    "info --image-opts driver=raw,file.driver=blkdebug,file.align=3,file.image.driver=file,file.image.filename=full.raw",
    "info --image-opts driver=raw,file.driver=blkdebug,file.bad=3,file.image.driver=file,file.image.filename=full.raw",
    "info --image-opts driver=raw,file.driver=blkdebug",
    "bench -c 10 json:{\"driver\":\"raw\",\"file\":{\"driver\":\"blkdebug\",\"image\":{\"driver\":\"file\",\"filename\":\"full.raw\"},\"set-state\":[{\"event\":\"read_aio\",\"state\":1,\"new_state\":2}],\"inject-error\":[{\"event\":\"read_aio\",\"state\":2,\"errno\":28}]}}",
    "info blkverify:full.raw",
    "info blkverify:missing:a.qcow2",
    "info blkverify:full.raw:missing",
    "info blkverify:full.raw:full.raw",
    "convert -O raw blkverify:full.raw:zlib.qcow2 n.raw",
    "convert -O raw blkverify:empty.raw:zlib.qcow2 n.raw",
    "compare blkverify:full.raw:zlib.qcow2 full.raw",
    "compare blkverify:empty.raw:full.raw full.raw",
    "bench -c 10 blkverify:full.raw:zlib.qcow2",
    "bench -w -c 10 --pattern 3 -f raw blkverify:full.raw:zlib.qcow2",
    "bench -c 10 --image-opts driver=blkverify,raw.driver=file,raw.filename=full.raw,test.driver=qcow2,test.file.filename=zlib.qcow2",
];

/// All cases, always in the same order.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for sub in SUBCOMMANDS {
        plain(sub, &mut cases);
        singles(sub, &mut cases);
        pairs(sub, &mut cases);
    }
    for name in NAMES {
        for command in ["info", "info --output=json", "check", "map"] {
            cases.push(Case::new(Kind::Name, &[&format!("{command} {name}")]));
        }
    }
    for graph in GRAPHS {
        let objects = "--object secret,id=s,data=abc --object throttle-group,id=g";
        let copy = format!("convert -O raw {objects} --image-opts {graph} new");
        cases.push(Case::new(Kind::Name, &[&copy]));
    }
    cases.extend(DEBUGGING.iter().map(|line| Case::new(Kind::Name, &[line])));
    let secrets = "--object secret,id=s,data=abc --object secret,id=n,data=def";
    let container = "--image-opts driver=luks,key-secret=s,file.filename=a.luks";
    for options in KEYS {
        let amend = |options: &str| format!("amend {secrets} {container} -o {options}");
        let lines = [amend(options), "info a.luks".to_owned()];
        cases.push(Case::new(Kind::Sequence, &[&lines[0], &lines[1]]));
        // With a second key in slot 5.
        let before = amend(KEYS[0]);
        cases.push(Case::new(Kind::Sequence, &[&before, &lines[0], &lines[1]]));
    }
    for options in MADE {
        cases.push(Case::new(Kind::Sequence, &[&format!("create {options} n.img 2M")]));
    }
    for (around, lines) in AROUND {
        cases.extend(lines.iter().map(|line| {
            let case = Case::new(Kind::Sequence, &[line]);
            Case { around: *around, ..case }
        }));
    }
    cases.extend(LOST_AND_ZERO.iter().map(|line| Case::new(Kind::Sequence, &[line])));
    cases.extend(WRONG.iter().map(|line| match *line {
        "" => Case { commands: vec![Vec::new()], ..Case::new(Kind::Wrong, &[]) },
        line => Case::new(Kind::Wrong, &[line]),
    }));
    for name in RARE {
        for commands in ON_RARE {
            let commands: Vec<String> =
                commands.iter().map(|command| command.replace('@', name)).collect();
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            cases.push(Case::new(Kind::Sequence, &commands));
        }
    }
    cases.extend(SEQUENCES.iter().map(|lines| Case::new(Kind::Sequence, lines)));
    cases
}

fn plain(sub: &Sub, cases: &mut Vec<Case>) {
    cases.push(Case::new(Kind::Wrong, &[sub.name]));
    cases.push(Case::new(Kind::Wrong, &[&format!("{} --help", sub.name)]));
    cases.push(Case::new(Kind::Wrong, &[&format!("{} --bad x", sub.name)]));
    cases.push(Case::new(Kind::Wrong, &[&format!("{} -Y x", sub.name)]));
    for operands in sub.operands {
        cases.push(Case::new(Kind::Plain, &[&format!("{} {operands}", sub.name)]));
    }
}

/// The option with a value, as words.
fn spelled(option: &Opt, value: &str) -> String {
    match (option.short, option.values.is_empty()) {
        ("", true) => format!("--{}", option.long),
        ("", false) => format!("--{}={value}", option.long),
        (short, true) => short.to_owned(),
        (short, false) => format!("{short} {value}"),
    }
}

fn singles(sub: &Sub, cases: &mut Vec<Case>) {
    for option in sub.options {
        let values = if option.values.is_empty() { &[""][..] } else { option.values };
        for (i, value) in values.iter().enumerate() {
            for (j, operands) in sub.operands.iter().enumerate() {
                // Each value meets the first two operands, and every operand meets some value.
                if j < 2 || j % values.len() == i {
                    let line = format!("{} {} {operands}", sub.name, spelled(option, value));
                    cases.push(Case::new(Kind::Single, &[&line]));
                }
            }
        }
        spellings(sub, option, cases);
    }
}

fn spellings(sub: &Sub, option: &Opt, cases: &mut Vec<Case>) {
    let operands = sub.operands[0];
    let mut add = |line: String| cases.push(Case::new(Kind::Spelling, &[&line]));
    let name = sub.name;
    let Some(value) = option.values.first() else {
        add(format!("{name} {operands} {}", spelled(option, "")));
        if !option.long.is_empty() {
            add(format!("{name} --{}=3 {operands}", option.long));
            add(format!("{name} --{} {operands}", &option.long[..option.long.len() - 1]));
        }
        return;
    };
    add(format!("{name} {operands} {}", spelled(option, value)));
    if !option.short.is_empty() {
        add(format!("{name} {}{value} {operands}", option.short));
        add(format!("{name} {operands} {}", option.short));
    }
    if !option.long.is_empty() {
        add(format!("{name} --{} {value} {operands}", option.long));
        add(format!("{name} --{}={value} -- {operands}", option.long));
        add(format!("{name} --{}={value} {operands}", &option.long[..option.long.len() - 1]));
        add(format!("{name} {operands} --{}", option.long));
    }
}

/// Each pair of options with a value of each; the values and operands change from pair to pair.
fn pairs(sub: &Sub, cases: &mut Vec<Case>) {
    let mut turn = 0;
    for (i, first) in sub.options.iter().enumerate() {
        for second in &sub.options[i + 1..] {
            for _ in 0..2 {
                turn += 1;
                let pick = |values: &'static [&'static str], by: usize| match values.len() {
                    0 => "",
                    len => values[(turn / by) % len],
                };
                let line = format!(
                    "{} {} {} {}",
                    sub.name,
                    spelled(first, pick(first.values, 1)),
                    spelled(second, pick(second.values, 2)),
                    sub.operands[turn % sub.operands.len()]
                );
                cases.push(Case::new(Kind::Pair, &[&line]));
            }
        }
    }
}

/// The subcommands with their options, for the page.
pub fn covered() -> impl Iterator<Item = (&'static str, Vec<String>)> {
    SUBCOMMANDS.iter().map(|sub| {
        let names = sub.options.iter().map(|option| match (option.short, option.long) {
            ("", long) => format!("--{long}"),
            (short, "") => short.to_owned(),
            (short, long) => format!("{short} (--{long})"),
        });
        (sub.name, names.collect())
    })
}
