//! A template as a program that counts what it does. The interpreter's instructions are rewritten: those that make or look at values
//! of any size become calls of [`super::operators`], which do the same and pay for it; the rest take constant time and cost fuel.
//! Every kind of instruction is named here, so that one that a later version adds is looked at before this compiles.
//!
//! Reading a template is bounded by its length, and by the length of an expression: what reads them calls itself for every operator.

use std::collections::BTreeMap;

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, WhitespaceConfig, ast, parse, tokenize};
use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

use super::limits::{MACRO, too_much};

/// Longest template, in bytes. The longest that are known have 30 KiB.
const SOURCE_MAX: usize = 256 << 10;
/// Longest expression, in words and signs. The longest that are known have some hundred.
const TOKENS_MAX: usize = 1000;
/// Most `elif`.
const BRANCHES_MAX: usize = 200;
/// Most different attributes that are set: an object with all of them is listed in one step.
const ATTRIBUTES_MAX: usize = 200;
/// Longest text or list that is made by multiplying constants, which is done when the template is read.
const CONSTANT_MAX: u64 = 4096;

/// Calls with this are looked up by name.
const BY_NAME: u8 = u8::MAX;

/// A program and its blocks.
pub(super) struct Program<'source> {
    pub(super) main: Instructions<'source>,
    pub(super) blocks: BTreeMap<&'source str, Instructions<'source>>,
}

impl<'source> Program<'source> {
    /// Reads a template. `trim_blocks` and `lstrip_blocks` are on, as Hugging Face's library has them.
    pub(super) fn new(name: &'source str, source: &'source str) -> Result<Self, Error> {
        let spaces = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
        check_length(source, spaces)?;
        let tree = parse(source, name, Default::default(), spaces)?;
        check_constants(&tree)?;
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&tree);
        let (main, blocks) = generator.finish();
        let blocks = blocks.iter().map(|(name, block)| Ok((*name, counted(block)?))).collect::<Result<_, Error>>()?;
        Ok(Self { main: counted(&main)?, blocks })
    }
}

fn check_length(source: &str, spaces: WhitespaceConfig) -> Result<(), Error> {
    if source.len() > SOURCE_MAX {
        return Err(too_much("it is longer than 256 KiB"));
    }
    let (mut tokens, mut branches) = (0, 0);
    for token in tokenize(source, false, Default::default(), spaces) {
        // What cannot be read is an error of the parser, which says more.
        let Ok((token, _)) = token else { return Ok(()) };
        tokens += 1;
        match token {
            Token::VariableStart | Token::BlockStart => tokens = 0,
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        if tokens > TOKENS_MAX {
            return Err(too_much("an expression is too long"));
        }
        if branches > BRANCHES_MAX {
            return Err(too_much("it has too many `elif`"));
        }
    }
    Ok(())
}

fn call(name: &'static str, arguments: u16) -> Instruction<'static> {
    Instruction::ApplyFilter(name, Some(arguments), BY_NAME)
}

/// The instructions that stand for one.
fn counted_instruction<'source>(instruction: &Instruction<'source>) -> Result<Vec<Instruction<'source>>, Error> {
    use Instruction as I;
    let same = instruction.clone();
    Ok(match instruction {
        // Through the formatter, which counts.
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        // The value is below the namespace.
        I::SetAttr(_) => vec![I::Swap, call("%put", 1), I::Swap, same],
        I::GetItem => vec![call("%item", 2)],
        I::Slice => vec![call("%slice", 4)],
        I::BuildMap(pairs) => match u16::try_from(pairs * 2) {
            Ok(values) => vec![call("%map", values)],
            Err(_) => return Err(too_much("a map is too long")),
        },
        I::BuildList(_) => vec![same, call("%list", 1)],
        I::UnpackList(_) => vec![call("%unpack", 1), same],
        I::Add => vec![call("%add", 2)],
        I::Mul => vec![call("%mul", 2)],
        I::StringConcat => vec![call("%concat", 2)],
        I::Eq => vec![call("%eq", 2)],
        I::Ne => vec![call("%ne", 2)],
        I::Gt => vec![call("%gt", 2)],
        I::Gte => vec![call("%ge", 2)],
        I::Lt => vec![call("%lt", 2)],
        I::Lte => vec![call("%le", 2)],
        I::In => vec![call("%in", 2)],
        I::CompareAndPreserve(_) => vec![call("%operand", 1), I::Swap, call("%operand", 1), I::Swap, same],
        I::PushLoop(_) => vec![call("%look", 1), same],
        // A recursive loop is called with what it goes over.
        I::CallFunction(_, Some(1)) | I::FastRecurse => vec![call("%look", 1), same],
        I::BuildMacro(..) => vec![I::LoadConst(Value::from(MACRO)), call("%pay", 1), I::DiscardTop, same],
        I::CallMethod("changed", _) => return Err(unknown("the method `changed` of loops is not there")),
        I::UnpackLists(_) | I::MergeKwargs(_) => return Err(unknown("arguments by `*` and `**` are not there")),
        I::LoadBlocks | I::Include(_) | I::ExportLocals => return Err(unknown("there are no other templates")),
        I::StoreLocal(_)
        | I::Lookup(_)
        | I::GetAttr(_)
        | I::LoadConst(_)
        | I::BuildKwargs(_)
        | I::Sub
        | I::Div
        | I::IntDiv
        | I::Rem
        | I::Pow
        | I::Neg
        | I::Not
        | I::ApplyFilter(..)
        | I::PerformTest(..)
        | I::Emit
        | I::PushWith
        | I::Iterate(_)
        | I::PushDidNotIterate
        | I::PopFrame
        | I::PopLoopFrame
        | I::Jump(_)
        | I::JumpIfFalse(_)
        | I::JumpIfFalseOrPop(_)
        | I::JumpIfTrueOrPop(_)
        | I::PushAutoEscape
        | I::PopAutoEscape
        | I::BeginCapture(_)
        | I::EndCapture
        | I::CallFunction(..)
        | I::CallMethod(..)
        | I::CallObject(_)
        | I::DupTop
        | I::DiscardTop
        | I::FastSuper
        | I::Swap
        | I::CallBlock(_)
        | I::Return
        | I::IsUndefined
        | I::Enclose(_)
        | I::GetClosure => vec![same],
    })
}

fn unknown(text: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, text)
}

fn target<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Iterate(to)
        | Instruction::Jump(to)
        | Instruction::JumpIfFalse(to)
        | Instruction::JumpIfFalseOrPop(to)
        | Instruction::JumpIfTrueOrPop(to)
        | Instruction::BuildMacro(_, to, _) => Some(to),
        _ => None,
    }
}

fn counted<'source>(program: &Instructions<'source>) -> Result<Instructions<'source>, Error> {
    let mut out = Instructions::new(program.name(), program.source());
    // Where each instruction begins now.
    let mut begins = Vec::new();
    let mut attributes = std::collections::BTreeSet::new();
    let mut at = 0;
    while let Some(instruction) = program.get(at) {
        let line = program.get_line(at).and_then(|line| u16::try_from(line).ok());
        if let Instruction::SetAttr(name) = instruction {
            attributes.insert(*name);
        }
        begins.push(out.len() as u32);
        for made in counted_instruction(instruction)? {
            match line {
                Some(line) => out.add_with_line(made, line),
                None => out.add(made),
            };
        }
        at += 1;
    }
    if attributes.len() > ATTRIBUTES_MAX {
        return Err(too_much("it sets too many attributes"));
    }
    begins.push(out.len() as u32);
    for at in 0..out.len() as u32 {
        let Some(to) = out.get_mut(at).and_then(target) else { continue };
        *to = begins.get(*to as usize).copied().ok_or_else(|| unknown("it jumps out of itself"))?;
    }
    Ok(out)
}

/// Constants are computed when a template is read: their products must be small.
fn check_constants(tree: &ast::Stmt<'_>) -> Result<(), Error> {
    statement(tree)
}

fn all<'a, 'source: 'a>(expressions: impl IntoIterator<Item = &'a ast::Expr<'source>>) -> Result<(), Error> {
    expressions.into_iter().try_for_each(expression)
}

fn body(statements: &[ast::Stmt<'_>]) -> Result<(), Error> {
    statements.iter().try_for_each(statement)
}

fn statement(tree: &ast::Stmt<'_>) -> Result<(), Error> {
    use ast::Stmt as S;
    match tree {
        S::Template(it) => body(&it.children),
        S::EmitExpr(it) => expression(&it.expr),
        S::EmitRaw(_) | S::Continue(_) | S::Break(_) => Ok(()),
        S::ForLoop(it) => {
            all([&it.target, &it.iter].into_iter().chain(&it.filter_expr))?;
            body(&it.body)?;
            body(&it.else_body)
        }
        S::IfCond(it) => {
            expression(&it.expr)?;
            body(&it.true_body)?;
            body(&it.false_body)
        }
        S::WithBlock(it) => {
            all(it.assignments.iter().flat_map(|(target, value)| [target, value]))?;
            body(&it.body)
        }
        S::Set(it) => all([&it.target, &it.expr]),
        S::SetBlock(it) => {
            all([&it.target].into_iter().chain(&it.filter))?;
            body(&it.body)
        }
        S::AutoEscape(it) => {
            expression(&it.enabled)?;
            body(&it.body)
        }
        S::FilterBlock(it) => {
            expression(&it.filter)?;
            body(&it.body)
        }
        S::Block(it) => body(&it.body),
        S::Import(it) => all([&it.expr, &it.name]),
        S::FromImport(it) => expression(&it.expr),
        S::Extends(it) => expression(&it.name),
        S::Include(it) => expression(&it.name),
        S::Macro(it) => {
            all(it.args.iter().chain(&it.defaults))?;
            body(&it.body)
        }
        S::CallBlock(it) => {
            expression(&it.call.expr)?;
            arguments(&it.call.args)?;
            all(it.macro_decl.args.iter().chain(&it.macro_decl.defaults))?;
            body(&it.macro_decl.body)
        }
        S::Do(it) => {
            expression(&it.call.expr)?;
            arguments(&it.call.args)
        }
    }
}

fn arguments(arguments: &[ast::CallArg<'_>]) -> Result<(), Error> {
    use ast::CallArg as A;
    all(arguments.iter().map(|argument| match argument {
        A::Pos(it) | A::Kwarg(_, it) | A::PosSplat(it) | A::KwargSplat(it) => it,
    }))
}

fn expression(tree: &ast::Expr<'_>) -> Result<(), Error> {
    use ast::Expr as E;
    match tree {
        E::Var(_) | E::Const(_) => Ok(()),
        E::Slice(it) => all([&it.expr].into_iter().chain(&it.start).chain(&it.stop).chain(&it.step)),
        E::UnaryOp(it) => expression(&it.expr),
        E::BinOp(it) => {
            all([&it.left, &it.right])?;
            if matches!(it.op, ast::BinOpKind::Mul) {
                check_product(&it.left, &it.right)?;
            }
            Ok(())
        }
        E::Compare(it) => all([&it.expr].into_iter().chain(it.ops.iter().map(|op| &op.expr))),
        E::IfExpr(it) => all([&it.test_expr, &it.true_expr].into_iter().chain(&it.false_expr)),
        E::Filter(it) => {
            all(&it.expr)?;
            arguments(&it.args)
        }
        E::Test(it) => {
            expression(&it.expr)?;
            arguments(&it.args)
        }
        E::GetAttr(it) => expression(&it.expr),
        E::GetItem(it) => all([&it.expr, &it.subscript_expr]),
        E::Call(it) => {
            expression(&it.expr)?;
            arguments(&it.args)
        }
        E::List(it) => all(&it.items),
        E::Map(it) => all(it.keys.iter().chain(&it.values)),
    }
}

/// A product of texts or lists with numbers. Those within the operands are checked already.
fn check_product(left: &ast::Expr<'_>, right: &ast::Expr<'_>) -> Result<(), Error> {
    let (Some(left), Some(right)) = (constant_size(left), constant_size(right)) else { return Ok(()) };
    let size = match (left, right) {
        (Constant::Number(_), Constant::Number(_)) => return Ok(()),
        (Constant::Number(times), Constant::Sized(size)) | (Constant::Sized(size), Constant::Number(times)) => {
            times.map_or(u64::MAX, |times| size.max(1).saturating_mul(times))
        }
        // Cannot be multiplied.
        (Constant::Sized(_), Constant::Sized(_)) => return Ok(()),
    };
    if size > CONSTANT_MAX { Err(too_much("a constant is too long")) } else { Ok(()) }
}

enum Constant {
    /// With its value, if it is written down.
    Number(Option<u64>),
    Sized(u64),
}

/// What the interpreter would compute when it reads the template; none if it waits until the template runs.
fn constant_size(tree: &ast::Expr<'_>) -> Option<Constant> {
    let size = |constant: Constant| match constant {
        Constant::Number(_) => 1,
        Constant::Sized(size) => size,
    };
    match tree {
        ast::Expr::Const(it) => Some(match it.value.as_str() {
            Some(text) => Constant::Sized(text.len() as u64),
            None => Constant::Number(it.value.as_usize().map(|value| value as u64)),
        }),
        ast::Expr::List(it) => it.items.iter().map(constant_size).sum_sizes(size),
        ast::Expr::Map(it) => it.keys.iter().chain(&it.values).map(constant_size).sum_sizes(size),
        ast::Expr::UnaryOp(it) => constant_size(&it.expr).map(|_| Constant::Number(None)),
        ast::Expr::Compare(it) => {
            let all = [&it.expr].into_iter().chain(it.ops.iter().map(|op| &op.expr));
            all.map(constant_size).sum_sizes(size).map(|_| Constant::Number(None))
        }
        ast::Expr::BinOp(it) => match (constant_size(&it.left)?, constant_size(&it.right)?) {
            (Constant::Number(_), Constant::Number(_)) if !matches!(it.op, ast::BinOpKind::Concat) => Some(Constant::Number(None)),
            // A product was checked on the way up.
            (Constant::Sized(_), _) | (_, Constant::Sized(_)) if matches!(it.op, ast::BinOpKind::Mul) => {
                Some(Constant::Sized(CONSTANT_MAX))
            }
            (left, right) => Some(Constant::Sized(size(left).saturating_mul(4).saturating_add(size(right).saturating_mul(4)) + 64)),
        },
        _ => None,
    }
}

trait SumSizes {
    fn sum_sizes(self, size: impl Fn(Constant) -> u64) -> Option<Constant>;
}

impl<I: Iterator<Item = Option<Constant>>> SumSizes for I {
    fn sum_sizes(mut self, size: impl Fn(Constant) -> u64) -> Option<Constant> {
        self.try_fold(0_u64, |sum, constant| Some(sum.saturating_add(size(constant?)))).map(Constant::Sized)
    }
}
