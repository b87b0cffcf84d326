//! The library as C programs see it: the header, the exported symbols, the examples, and every
//! function called from C.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

use vdkit_testbase::require_peer;

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// The library, linked as users get it, and the programs.
struct Built {
    folder: tempfile::TempDir,
}

impl Built {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        // Cargo puts the static library beside this test.
        let here = std::env::current_exe().unwrap();
        let deps = here.parent().unwrap();
        let newest = std::fs::read_dir(deps)
            .unwrap()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                name.starts_with("libvdkit_c") && name.ends_with(".a")
            })
            .max_by_key(|path| path.metadata().and_then(|found| found.modified()).ok());
        let made = Command::new(Path::new(HERE).join("../../scripts/make-libvdkit"))
            .arg(folder.path())
            .env("STATIC", newest.expect("cargo built the static library"))
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        Self { folder }
    }

    fn library(&self) -> PathBuf {
        self.folder.path().join("libvdkit.so")
    }

    /// Compiles a program against the shared library, for one test.
    fn compile(&self, test: &str, source: &str) -> PathBuf {
        let program = self.folder.path().join(test);
        let compiled = Command::new("cc")
            .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g"])
            .args(["-I", &format!("{HERE}/include"), "-o"])
            .arg(&program)
            // An absolute path stays as it is.
            .arg(Path::new(HERE).join(source))
            .arg(format!("-L{}", self.folder.path().display()))
            .arg(format!("-Wl,-rpath,{}", self.folder.path().display()))
            .args(["-lvdkit", "-lpthread"])
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{source}: {}", text(&compiled.stderr));
        program
    }
}

static BUILT: LazyLock<Built> = LazyLock::new(Built::new);

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn must(command: &mut Command) -> Output {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}{}", text(&done.stdout), text(&done.stderr));
    done
}

/// The header is what `make c-header` makes; VDKIT_UPDATE_PAGE=1 writes it.
#[test]
fn the_header_is_made_from_the_sources() {
    let config = cbindgen::Config::from_file(format!("{HERE}/cbindgen.toml")).unwrap();
    let bindings =
        cbindgen::Builder::new().with_crate(HERE).with_config(config).generate().unwrap();
    let mut made = Vec::new();
    bindings.write(&mut made);
    let (made, path) = (text(&made), format!("{HERE}/include/vdkit.h"));
    if std::env::var_os("VDKIT_UPDATE_PAGE").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(there == made, "include/vdkit.h is out of date: run `make c-header`");
}

#[test]
fn only_its_own_symbols_are_exported() {
    let listed = must(Command::new("nm").args(["-D", "--defined-only"]).arg(BUILT.library()));
    let listed = text(&listed.stdout);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let header = std::fs::read_to_string(format!("{HERE}/include/vdkit.h")).unwrap();
    assert!(names.len() > 50, "{listed}");
    let mut exported = Vec::new();
    for name in names.iter().filter(|name| !name.starts_with("VDKIT_")) {
        let (function, version) = name.split_once("@@").unwrap_or((name, ""));
        assert!(function.starts_with("vdkit_"), "{name} is exported");
        assert!(version.starts_with("VDKIT_"), "{name}");
        assert!(header.contains(&format!("{function}(")), "{function} is not in the header");
        // The header says of later functions which version has them.
        let later = format!("Since VDKIT_API_VERSION {}", version.trim_start_matches("VDKIT_"));
        let comment = comment_of(function, &header);
        assert_eq!(version != "VDKIT_1", comment.contains(&later), "{name}: {comment}");
        exported.push(function);
    }
    for function in functions(&header) {
        assert!(exported.contains(&function), "{function} is missing in vdkit.map");
    }
    let dynamic = must(Command::new("readelf").arg("-d").arg(BUILT.library()));
    assert!(text(&dynamic.stdout).contains("soname: [libvdkit.so.0]"));
}

/// The names of C programs are all in one space.
#[test]
fn every_name_of_the_header_has_the_prefix() {
    let header = std::fs::read_to_string(format!("{HERE}/include/vdkit.h")).unwrap();
    let declared: Vec<&str> = header.lines().filter_map(declared).collect();
    assert!(declared.len() > 100, "{declared:?}");
    for name in declared {
        assert!(name.starts_with("vdkit_") || name.starts_with("VDKIT_"), "{name}");
    }
}

/// The name that a line of the header declares: a macro, a type or a function. Lines within a
/// declaration are indented.
fn declared(line: &str) -> Option<&str> {
    if let Some(name) = line.strip_prefix("#define ") {
        return name.split(' ').next();
    }
    if line.starts_with([' ', '/', '#']) || !line.contains(['(', ';']) {
        return None;
    }
    let before = match line.split_once("(*") {
        Some((_, function_type)) => function_type.split(')').next()?,
        None => line.split(['(', ';']).next()?,
    };
    before.rsplit([' ', '*']).next()
}

#[test]
fn each_function_has_a_manual_page() {
    if !require_peer("python3") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    must(Command::new(Path::new(HERE).join("../../scripts/c-manual")).arg(folder.path()));
    let header = std::fs::read_to_string(format!("{HERE}/include/vdkit.h")).unwrap();
    let page = |name: &str| {
        let path = folder.path().join(format!("{name}.3"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let overview = page("libvdkit");
    for function in functions(&header) {
        assert!(overview.contains(&format!("\\fB{function}\\fP(3)")), "{function}");
        assert!(page(function).contains(&format!("{function} \\- ")), "{function}");
    }
    let convert = page("vdkit_convert");
    for part in ["VDKIT_CONVERT_VERIFY", "fBvdkit_free", "const vdkit_monitor *monitor", "progress"]
    {
        assert!(convert.contains(part), "{part}");
    }
}

#[test]
fn the_header_is_good_for_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("a.cc");
    std::fs::write(&source, "#include <vdkit.h>\nint main() { return vdkit_error_code(); }\n")
        .unwrap();
    if Command::new("c++").arg("--version").stdout(Stdio::null()).status().is_ok() {
        must(
            Command::new("c++")
                .args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-I"])
                .arg(format!("{HERE}/include"))
                .arg(&source),
        );
    }
}

#[test]
fn every_function_called_from_c() {
    let program = BUILT.compile("plain", "tests/api.c");
    let folder = tempfile::tempdir().unwrap();
    if !made_for_the_program(folder.path()) {
        return;
    }
    let done = must(Command::new(&program).current_dir(folder.path()));
    assert_eq!(text(&done.stdout), "all good\n");
    let used = [
        include_str!("api.c"),
        include_str!("keys.h"),
        include_str!("opening.h"),
        include_str!("serving.h"),
    ]
    .concat();
    let header = std::fs::read_to_string(format!("{HERE}/include/vdkit.h")).unwrap();
    for function in functions(&header) {
        assert!(used.contains(&format!("{function}(")), "{function} is not tried");
    }
}

/// The functions of the header.
fn functions(header: &str) -> Vec<&str> {
    let declares = |line: &&str| !line.starts_with("//") && !line.starts_with(' ');
    let names = header.lines().filter(declares).filter_map(|line| {
        let (before, _) = line.split_once('(')?;
        before.rsplit([' ', '*']).next().filter(|name| name.starts_with("vdkit_"))
    });
    let names: Vec<&str> = names.collect();
    assert!(names.len() > 70, "{names:?}");
    names
}

/// The comment above a function's declaration, as one line.
fn comment_of(function: &str, header: &str) -> String {
    let lines: Vec<&str> = header.lines().collect();
    let declares = |line: &&str| !line.starts_with("//") && line.contains(&format!("{function}("));
    let at = lines.iter().position(declares).unwrap();
    let above = lines[..at].iter().rposition(|line| !line.starts_with("//")).map_or(0, |at| at + 1);
    lines[above..at].iter().map(|line| line.trim_start_matches("//")).collect()
}

/// What tests/api.c cannot make itself: an encrypted image, and certificates. Whether it could be made.
fn made_for_the_program(folder: &Path) -> bool {
    if !require_peer("qemu-img") || !require_peer("openssl") {
        return false;
    }
    let script = r#"
        set -e
        qemu-img create -q --object secret,id=key,data=first -f qcow2 \
            -o encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10 encrypted.qcow2 1M
        mkdir pki
        cd pki
        openssl req -x509 -newkey rsa:2048 -nodes -keyout ca-key.pem -out ca-cert.pem -days 2 -subj /CN=ca \
            -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
        echo 'subjectAltName=DNS:localhost' > ext
        for who in server client; do
            openssl req -newkey rsa:2048 -nodes -keyout $who-key.pem -out $who.csr -subj /CN=localhost
            openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
                -out $who-cert.pem -days 2 -extfile ext
        done
    "#;
    must(Command::new("bash").args(["-c", script]).current_dir(folder));
    true
}

/// The same under valgrind: no invalid access, nothing lost.
#[test]
fn no_memory_is_lost_or_misused() {
    let folder = tempfile::tempdir().unwrap();
    if !require_peer("valgrind") || !made_for_the_program(folder.path()) {
        return;
    }
    let program = BUILT.compile("valgrind", "tests/api.c");
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite"])
        .args(["--trace-children=no", "--child-silent-after-fork=yes", "--fair-sched=yes", "-q"])
        .arg(&program)
        .arg("without-fork");
    must(valgrind.current_dir(folder.path()));
}

#[test]
fn the_examples_do_what_they_say() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let raw: Vec<u8> =
        (0..1_u32 << 20).map(|i| if i % 3 == 0 { 0 } else { (i >> 8) as u8 }).collect();
    std::fs::write(at("a.raw"), &raw).unwrap();
    let convert = BUILT.compile("convert", "examples/convert.c");
    let done = must(Command::new(&convert).args([at("a.raw"), at("a.qcow2")]).arg("qcow2"));
    assert!(text(&done.stdout).contains("\"virtual-size\":1048576"), "{done:?}");
    assert!(text(&done.stderr).contains("########]"), "{done:?}");
    let failed =
        Command::new(&convert).args([at("none"), at("b.qcow2")]).arg("qcow2").output().unwrap();
    assert!(
        !failed.status.success() && text(&failed.stderr).contains("No such file"),
        "{failed:?}"
    );

    let done =
        must(Command::new(BUILT.compile("extents", "examples/extents.c")).arg(at("a.qcow2")));
    assert!(text(&done.stdout).contains("data, "), "{done:?}");

    let done =
        must(Command::new(BUILT.compile("callbacks", "examples/callbacks.c")).arg(at("a.qcow2")));
    assert!(done.stdout == raw, "the bytes differ");

    let mut server = Command::new(BUILT.compile("serve", "examples/serve.c"))
        .arg(at("a.qcow2"))
        .arg(format!("unix:{}", at("sock").display()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut uri = String::new();
    let stdout = server.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut uri).unwrap();
    let done = must(Command::new(&convert).args([uri.trim()]).arg(at("b.raw")).arg("raw"));
    assert!(done.status.success() && std::fs::read(at("b.raw")).unwrap() == raw);
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
}

/// The recipes of docs/c.md, compiled as functions of one program and run in turn.
#[test]
fn the_recipes_work() {
    let page = std::fs::read_to_string(format!("{HERE}/../../docs/c.md")).unwrap();
    let recipes: Vec<&str> = page
        .split("```c\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap_or_default())
        .collect();
    assert!(recipes.len() >= 10);
    let mut program = String::from(
        "#include <poll.h>\n#include <stdio.h>\n#include <string.h>\n#include <vdkit.h>\n",
    );
    let mut main = String::from("int main(void)\n{\n");
    for (i, recipe) in recipes.iter().enumerate() {
        if recipe.starts_with("static ") {
            program += recipe; // a callback of the next one
            continue;
        }
        program += &format!("static int recipe_{i}(void)\n{{\n{recipe}return 0;\n}}\n");
        main += &format!(
            "if (recipe_{i}() != 0) {{ printf(\"recipe {i}: %s\\n\", vdkit_error_message()); return 1; }}\n"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("recipes.c");
    std::fs::write(&source, program + &main + "return 0;\n}\n").unwrap();
    let program = BUILT.compile("recipes", source.to_str().unwrap());
    let done = must(Command::new(program).current_dir(folder.path()));
    let said = text(&done.stdout);
    assert!(
        said.contains("hello of 67108864 bytes") && said.contains("error -13: missing.qcow2"),
        "{said}"
    );
}
