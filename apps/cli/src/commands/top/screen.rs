//! The terminal while the live view has it.

use std::io::{self, Write, stdout};
use std::time::Duration;

use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use crossterm::style::{Attribute, Print, SetAttribute};
use crossterm::terminal::{
    Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{cursor, queue};

use crate::failure::colours_wanted;

/// What the user did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    /// Nothing of interest.
    Nothing,
    /// Asked for the end.
    Quit,
    /// Made the window larger or smaller.
    Resized,
}

/// The terminal; dropping it gives it back as it was.
#[derive(Debug)]
pub struct Screen(());

impl Screen {
    /// Takes the terminal.
    pub fn take() -> io::Result<Self> {
        enable_raw_mode()?;
        // From here on dropping gives it back.
        let screen = Self(());
        queue!(stdout(), EnterAlternateScreen, cursor::Hide, DisableLineWrap)?;
        stdout().flush()?;
        Ok(screen)
    }

    /// Shows these lines, as far as there is room; the first stands out.
    pub fn show(&self, lines: &[String]) -> io::Result<()> {
        let (columns, rows) = size()?;
        let mut out = stdout().lock();
        for (row, line) in (0..rows).zip(lines) {
            let line: String = line.chars().take(columns.into()).collect();
            queue!(out, cursor::MoveTo(0, row))?;
            if row == 0 && colours_wanted() {
                queue!(out, SetAttribute(Attribute::Bold), Print(line))?;
                queue!(out, SetAttribute(Attribute::Reset))?;
            } else {
                queue!(out, Print(line))?;
            }
            queue!(out, Clear(ClearType::UntilNewLine))?;
        }
        if let Ok(below) = u16::try_from(lines.len())
            && below < rows
        {
            queue!(out, cursor::MoveTo(0, below), Clear(ClearType::FromCursorDown))?;
        }
        out.flush()
    }

    /// What the user does within a time.
    pub fn wait(&self, time: Duration) -> io::Result<Did> {
        if !event::poll(time)? {
            return Ok(Did::Nothing);
        }
        Ok(match event::read()? {
            Event::Key(key) if key.kind == KeyEventKind::Press => {
                let control = key.modifiers.contains(KeyModifiers::CONTROL);
                match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => Did::Quit,
                    KeyCode::Char('c') if control => Did::Quit,
                    _ => Did::Nothing,
                }
            }
            Event::Resize(..) => Did::Resized,
            _ => Did::Nothing,
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing can be done where the terminal is gone.
        let _ = queue!(stdout(), EnableLineWrap, cursor::Show, LeaveAlternateScreen);
        let _ = stdout().flush();
        let _ = disable_raw_mode();
    }
}
