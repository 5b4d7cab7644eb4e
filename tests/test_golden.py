"""The order in which data comes out is part of the interface: to change it is to break every run that is under way.

The files are kept here byte by byte, since another version of pyarrow may write others. If these tests fail because the
order was changed on purpose, say so in CHANGELOG.md, and print the new hashes with ``python tests/test_golden.py``.
"""

import base64
import functools
import hashlib
import sys
import tempfile
import zlib

import corpora
import pytest

from ibm_nodes import Mixer, Packer, Reader, Sharder, Shuffler, storage

# Documents of 0 to 40 tokens, 1000 * document + position: 60 in six record batches, and 45 in four row groups.
# Compressed with zlib, in base 85.
FILES = {
    "prose/000.arrow": """
c-qa`b(9rl8vyWuO<;jtK*ajQRxA_)FlYn}knTp2?vACG6p;=^1wk;7TuM?wLJ$y<?p8@f^7}1bj>5qY{D<?+IluefdGE|SclN%|GtcbgDPFv2nJ0qaf
@M+=1hGNVk}`-1B7=w^+B-|KaO;7!Xs_X+SKXm@wSBF{Wbi)o-#&YgNSZaQTdP6Sr2g=WpT!0lj1d_`T^uzwbj)PQWB;~)5Nh9QR;zw+@z^m$T|9Qu#+
gIgBz^BhZHCZ#Opr13&0{W(9)yJlnKaqMLK`@vOg;$@om<7wIj0K#TEc^WUb0@%UfCZV_E%r>E5=P)7XHJyQQSig%21u!v}6?XLi_GF{s9hhh{OEMFRV
7m_pD(p>-d57{Ky7=Vk4W_%oet?jqU7UC%f3q9`>@2{T$#Rhe&jCGnvI~<}jD9n8$n;u#iP8=4-xT2}}8wWh`d}D;b?O2tMFLK4J`G`IvEx=MyF{kx%)
I&-sE$e92^{FqLUcX9kJPWEQiT!(0;52SHDI(VIT>r5|t8pLZBQqnm@EF->SnGn!NOwjd}+c`8tmN>ru_RjEdGYEY9}yg}|egCGxi$wz()P>`1>L}7~X
GOzF|uThj@yiRdSP?A!VrVM2%M|mnxkxEpi3RS5_b!t$PT0CfCK13EC<`Ev{F&-x?Pw*t!c#5ZahG)r64s!Aw&+`H=l8fBrAusvJPXP+@5``#C>;pj%N
4f{DKknz>pt$dUjkw=^l`;L~K{iS!<vH3ggt1I!1sg*9p2`vge{h;JoaG$nxj^u+q)2kY2q%I_qKGC1DM>{PsYydxVu>Ri+aHq$*vT$-vxmLxV?PHt$R
Q5%Gr#aFM>xtcj&p*O{KoGreNx=BjODCgCEu}%)qKwy*0PQtSkI4a;3qb+iOp<bE8E!44tBDO-Rxm6``FI`4l?N(xq`_|VJg#@&I}Tn$t-3whq-*kJm#
~2g$&IZ1j8842u3oB_jsSte87i%#2Ci%G2<9d{EI=*iOzJPE8XZ$4-)7}FM895zVzd5`tuG0c$a|;VlYD($}omAf|1nDYyMG(y40gS4QNOs8q<WPG^07
i3d%PWrvxP_MQO@VmU5J*0u{+#L@ppF&+$Aj@FKa$O&;=+kNgy%ATLpf!W7|UUg1?<qbS9Aoy@NV!Cl<VJ>1KE+|L6%$U|h|VWNwR4^onf7*dmlw8Roe
I?@-v{`_<52IZf{*T_FduQKMXNTtEkIHjNlEf~g^q5QKdwC|BpT8?p?6P)BXe&-Z_aGEom<s9d^Q0mVlmyG0u5l#e=L=jC2Hk1?FY-AIg*}_(~v7H_4W
EZ=cUr7wIkVP!!YrbI#OZk>%EN2BP8DC8u!2~AqDWCB<UoeR;namWXGL7lXAd#8OVm5P_%U8@}J_}gLA{NuXmiS}<?=p}<3}y&J8OCr%Fp^Qc$NP+?m5
W7d+R&DEw5J0diKi2t=|We!(VZS7(34(NRb5x3IyI<CQpNoSZ&I7Ls6$=qQJ)4hq!Ep2LQ|U2oEEgC6|HGQTiVf{4s;}*PIRVFW3f#UUgi~E<u!^@jMp
hn2})9m(v+br<tR@DDpHBcR3U3~bqY_Cji-2;XLy$E<RB-{@jNf^BDu&-9`cfp{1l)dFHwlX6d_aVAh?BF3EG?cBqxk;B8Vi4Xi|`pRK$>)G^8b#IMR`
x4BSLUZYC4Aa4WZQJ9qFO?j$pJwf}ebOIdGF-U_afx8`4E%=<$*>p5Iff|{Y)X>jOXDan}7zWd`{>p93F4)Zg=@GD0+$}x^}f|LBl@0{WfPIHE{oZ~zf
2s-&~NlqByL=Z_7(WD?HsfZyptGlXkSi@S@@dNAmkq!LBMmDjTEo>z*LEd2&vzfzOM)y%)@F5>DhOvCiIL7k{6G-SU2hfY&^r0{Pc$@yb!vNl8AcGjp5
QZ|0;f!D;qj-<^8O;ZL$VZG}ER6=r7c`+M&1g;wTGEQvw4p8SXio<^5>F>O(}k{dqwG+zPkAa(kxEpi3RS5_b!t$PTD-xV)aEVfP?vhtrvVLVL}QxJl-
wib0`iiN{1l)du_j*}=}1ooZXzS6#+gr?<_u>!$9XOgj5nW1P8i`t5J?o#q#z}!h#@s;NJ}hnq$B<K>yP*7@Ea5F>#h;+C$BPQMxG)U1t=MccYo^OeP*
#HwD0zb>H~JNi{0#DFZ<Zf0S<DA!~D!I{K^rIa*X4g;3P}GP(!ec<*Z;O-?56-e9s!zvW_2E&yQ^2CpNN)&1_*S+t|(ycCw4z>|xRrH3*ZL!c?X)of#x
DlUWR%Ato8l2u3oB_}OBH&UB$G-RMpa66i@Udeeu#^rQAXaX}sGQjhvHpdpQDOcR>YjOMhUC9P;p8`{#2_H>{l@pPgyUFb?Ty3>OMdeV#D^r0`s7O4d&
P6<j<iqe#!EafOq1u9aB%2c5$)u>JlYEp|gc$3<^MIGu=kNPyAA&qEE_9bcta*}zu>nwM35BG8(_wxV`@(@{gm`8Y&$9SBqJi(J><0+oz8J;COImk)0!
aM~jNkt5)Nkdv<i6b59$-qry<YqE)3%7C`w{r*o;ZBYSsG}U?I43yCZ~V?F{@^rcILkTCb0H}h*UDogCya0+h$M<=Qjn5V#E_aaq$QR((yje>bxT6B|D
DGot}~Bix}v?ZzfrQw^H{_c+f}^EnCZEfJQNLWvthlwz(zK)nJsK(8{65zPIj@IJ?v#4`#Hct=5KVr!9o_Xn6LSUB`oDzma&`_tmHdZv6}H))d);rBA@
aZpYsKi_>##?VJg#@&I}Tn$t-3whq-*kJm#~2g)Cw*{dcN07{I#>WDtWH!cc}WoDqy<6s`8kEwrI6?PyO2IucJOI@5)&d;gqAL1-?-m`#xvXHe{)bI6Q
HdImB&G&dsuR)1b<FFi*{48Oep(*GH=r?|ZT(*6ID)R*^Ps;{@lUEY7`Iy^q(<^2iCE}u*PZ_i?iIY^$1&yxNNMq&N=
    """,
    "code/000.parquet": """
c-rmQhgTHW0>|;$0)iDWi%U_lt$<4}A~u#LC@Nx9><S{NhzKZ_L=hWS5T&EiJBp}@T?A2#i7}>O?+JFr8WYX??y52GoE%^NfH&uUc4l@i_wMe@{mmWxR
Q|RysVrWP;wy`j$^?Bun0!YNrXUbOn2KObLkL1K9WyW!VVH$*%ti#}AQDlC#$3!p4CZ42ydMaH4+dc{d@%$=F${hf4u6b*O_Lzl!VdOufFqpH3(n{b7x
aPrxgZ$A2*xl$2XsUyn4&YfpewqeI~3>vGnm5yJ)wjptY8fr*g|+E2qK6fffQQMMl<L@7tPTEEz$T|5N_iR?&2Qq;{hJx5gwxnPw*7aa7H8&zQb93k00
<Oe!|aaz&V`91zf}>T*eh##Wh^V4cx>n{DNQ6h}*b>ySRtFS|VW|_TvB!;t&qw2&!=uHK@fg)ZsWzpdQ(}A|VI4$U{B~P>3QFqXeZWLpdt29Xn8oov1>
5E0M4oYp@pUupS$bfJAIW5;kEol97T`q#+#{$V3*lU@NvE8#%~D9`aFuLKLAGB`8HiTahpak%&Sx=3*XVFdqxB5R32`KF4A#K`fRc4$H6{E3gu)5Fir?
V=xxuFdh>y5tA?(QxJ$COhquJAq1hAjv1JVFw8<YW+MV~5D8a9k)VPbWP<FN7DcHJ1wEOzOxr{*RUeQ`)$w2;nEh?9ZCeI`5|TIFL|Shi>WSWNTrpt70
{T#IJHZqRkwjZU{Wz&a*If|n$X&Bzmr8W>%>t^kmo96j*Tp-{H79OG3%OlrLv_xwRc%b&;^nH`<*VD7`4<Nq&0Vp!y-i?!nksMQdSmCv#)hMLs}ef7#_
1Tk<;QRA>YZdZrY3*&rXGH|-sx@yYm$2gRE3_aDOj6oJ-H^{(7kY7x_#)`;xV;_>oa>rT(3`eFWRuB&-|vwbG1bY+Xlpnb&WiV6LZ|-_07i~E8dtlFtL
kIhDS+K!QeEz>F1A?Y$_U-?Y7#;vvhOGh+_Yev2~@%Wuq$tPiA<QrBsaD8+rSDU0LdmN!4+>#$M%VJA>+z%*P!sPu~@CCf6s^t0H61%!aDz7minCemVP
U&1&O;+q3pXHJ&XQcVhdN12K=TpUfP%W9y+sFPm;(II&~fktKpic)JkP)om!gvPTk4P@8oS3FfdsPbgstD_Fw@wy=Xe9N-8i^nx>b!v%fN7yZy51K<i3
+~5umc)|+<;SC??bruP2p^tX>1Tq+)J>)Qi5sYDi4(NzZFhyr{L05D`cPP*UW-x~ZdO`_HSiu@Lu!SA$;Q&Xx>?RU^!z=ubKkyn{oWh?Fx{Cx6#E?J=E
okGa89|BbxPhCvg?gn(IEk-t3SZ+JoW{2}gYR$_l{SPHs;~>Yu?Jt^OYFry?8gBd#33BU5me(SYEX+~sKarbKs`?4E1bgD_y%bX1ROGui7afvR%}Bya*
&HW<f8zEC_*txP>M2?qXMzcgcahj49l?sE3pdkSdBGUi*;C!4M;#DHX;d|uo=lnK`PRajtpcXv@hX>8JLMM%tAPvJ-Bw^f<EYre&`QVZ>}eFL05D`cPP
*UW-x~ZdO`_HSiu@Lu!SA$;Q&WCp%<Ld8!qSr9bb{4i{@y7mS~06Xaha8g+AKh6UbnI_K?F6Mlgm6I{0cr_`H;&lr>5I3SspDxl}#$4a8=D+tY+_S4{{
z5V3tl&E71zqE2EZOkgI`TD;gvv!g?`H)4t8^`BEEIs*ieSR&QZZl<H#yhY1at=s6e)o=HS%%Hv8(8$=NL&r|0ox61H)?LxV%-o`<($dP>#@5c>!O^Lg
b8nYEef#wv;Hq+S_we)@=<PFTu<wwe!~BN(kN9-tsL=sq#*Q05VdA98Qv!pg22TqKojzk`*sSo`5pyD=qUX+wnZID+qR&2Gyd-vM+_L2>R<4R)y=LvY^
&1irHzsY`oSc%HmY$KBwPowJ?3~=Z{DQ)w;*!#`@`~*{DtA`x+P&wCFZb@-f8gMu!$+!**3=%WJAR`6<X5M@{^s<zXTCf8{SQC>^mD_x^A|2&x_ss8wd
*%--umU&#@l!9-n;+c;iJb*Po6$|{(?M>)u;H%s^3n09}N=;kI{rDc#3Cuju&`|-|z~*;}5*X8~h2uk34}G5=fy1Z8U=pbkQ6w&=RfCFoH=N&f@|u;u0
?73a;WBuA_Q1nSdJ9;uz{sJdQDoQk0<_71)j)sKicGVHb8|557R+B*rC@unC)yj1;6I4e7{0CbF;vTd@t<$U!dhkdFcsq6oz(K`F{mjtXqY4pd?%s;~>
Yu?O>mm^@)27U45|j>TAlSS&>xmSH(oU?o-|9;>kiYq1XNu>lE4#6~1x6E-6mDM&>c(lI%NNfrX(J(GJL24OIKF$6;~41O36e~iGV7>Q9BjR1_nSd7DX
Ou$4;!emTAAZ%unL$HHA9N-8i^nx>b!v%fN7yZy51K<i3+~5umc)|+<A&(+=U<6~BpaVLh6HL(=UC<TX&>af&fEmnTfu2yp5>~K=4QyctdpN)mPUr<^^
o9$B7{(67kU$D8Xrmc)po`{cftF~6)@TDgw1qwz7xEB;JGhH`xQ_>Th(~ygCOpAYJi~Lmz)PH2%zYeZ@jZUPkN62cqXFk|9v5&Cmv9+Za23~Z9XD_jx9
|&oMI&zG4({UKVolyZ*P<xZf%HD_)d%EKbu_6b-5>Ted2gY~dnH-_;<cV8^)>1LT={OI?euQqt^al+PVH)@+&=%Ga{rGhx1_m=cV+g`WjgIF#@AQo)UM
L&Iw;F~XKvkEx&4fb^*i%UByjiGt4;Bhofc{C9(&`M&0#+d;2;j+Fpi)aM^S@X977$lSCXE{MIQ1|fI<|Z7$qo08OjmAhGfGUti?L4#|9)I5gU<&P1uZ
Nq#zY(NJj=Tk%cYTifzb74k9-2c!)?uAsTZr4>6dJ1z3nh2uLE`Fc#x59uqJTlQ0=m5QreSrjSr@gF8In2`>zUH+(P%gW-!I7>Z%=!*KXx1U|(`jKXLH
U`&c;WIYv8l<Jf9eq^Z+$ffGjrXE=z_B11l6DnxEIbtCCuV-5I2s$m2G&7Eko$P8RZymop@Mx%W$He%lZY2R$Y3rud-k#q-J2BM5B7JD_<{5P}_D!rz3
-c;F7rr+u{KVbg7FTCScq@$(>hmK{hPiAzQye|0V(gBF@_DE3FFbO!a=x!srbs3=^mP>E+EGEF!Lz2w#Db$(t{pvlW^j0vOf1v(?aOCyl**-H)1#s}Di
e1X%bNv<1<wi&j}{EZ8u}WVC<GIk*w9hX)-!Z|_otfb@2klKgE*<dSp$lqN>8El@n?HOCD*#3?n>ad6AOLK6-JE`Lodw(JTK~oj1)Sogn!j_lf)ofMo}
D8D9#&vd`kOIeK)B477LHmCqvzm5v{QPcb!*D4gQc*6j}WhuX=twU;nA|LaFA9S8KjFEg8`Y>wnkzX^}ydE=6%>u;RJL$1lNu=)7f(NYnXg^?wA^Ew!W
-)^sj!sq*(9HrnOwMI(PHvQ{s>RO)58>g_UErHWCxg{Zt#st}cXh~_;vH<fCLdc$3%^3lBUVa?+C*NcrG?Zv2Diy5ij_xaGY+q=eD#;A8~0_~#10>g)B
j=OzmWTd)Z`uA3Uj`s)OE}rh5?>@x){#1Xp?-nt2;Hc=g`ynb1P1iy1s%ol-e5l{ApCC7lm=ZZ>Zg8|^P(*~~l*q{0F{bl^BcrCz4mY)Pva+$VH8e5d_
Y2|j@l*NR{s*+Z>bn
    """,
}
READING = "e770808140733899c211bb21fe737c287dae818f3920dc7874ba76699d76fdf9"
PACKED = {
    "pad": "de2d8d34b4a5356a970bfff133a09f5902f8f9f145c0d10b65d4e0fe002903af",
    "best_fit": "8b61ae64ce4f83258ba1b560cf9895312c4086fd27c4708bfb47c00d8aadb9f8",
    "changed": "1c09ea8f8ed6a4d0cc0c099a5196b0a5547dc4ea7ccefd5e04937dcf1ed354b7",
}
STREAM = "0950eb0a546fd14a44a01b56a5b9b007532171641cd0da967408ebd646a45d53"


def put_files(root):
    for key, text in FILES.items():
        storage.write(f"{root}{key}", zlib.decompress(base64.b85decode("".join(text.split()))))
    return root


@pytest.fixture
def root(tmp_path):
    return put_files(f"file://{tmp_path}/")


def digest_of_reading(root):
    """The documents of two passes over both datasets, in three logical shards."""
    digest = hashlib.sha256()
    for name in ("prose", "code"):
        for shard in range(3):
            for document in Reader(f"{root}{name}/", name=name, shard=shard, num_shards=3, seed=7, epochs=2):
                place = name, document.url.removeprefix(root), document.row, document.epoch
                digest.update(repr((place, document.tokens.tolist())).encode())
    return digest.hexdigest()


def digest_of_stream(root, count=400):
    """The first samples of a mix, packed and shuffled, of eight logical shards."""
    graph = functools.partial(build, root=root)
    digest = hashlib.sha256()
    for sample, _ in zip(Sharder(graph, num_shards=8, rank=0, world_size=1), range(count), strict=False):
        places = [(name, url.removeprefix(root), row, offset) for name, url, row, offset in sample.documents]
        digest.update(repr((sample.tokens.tolist(), list(sample.starts), places)).encode())
    return digest.hexdigest()


def digest_of_packing(root, strategy, count=200):
    """The samples of the same mix, packed in another way; of "changed" seq_len changes at loads."""
    digest, state = hashlib.sha256(), None
    for seq_len in (32, 96, 16) if strategy == "changed" else (32,):
        graph = functools.partial(build, root=root, seq_len=seq_len, strategy=strategy.replace("changed", "best_fit"))
        node = Sharder(graph, num_shards=8, rank=0, world_size=1)
        node.reset(state)
        for sample, _ in zip(node, range(count), strict=False):
            places = [(name, url.removeprefix(root), row, offset) for name, url, row, offset in sample.documents]
            digest.update(repr((sample.tokens.tolist(), list(sample.starts), places)).encode())
        state = node.state_dict()
    return digest.hexdigest()


def build(shard, num_shards, *, root, seq_len=32, strategy="concat"):
    more = {"shard": shard, "num_shards": num_shards, "seed": 7}
    sources = {name: Reader(f"{root}{name}/", name=name, **more) for name in ("prose", "code")}
    node = Mixer(sources, weights={"prose": 0.7, "code": 0.3}, seed=(7, shard))
    return Shuffler(
        Packer(node, seq_len=seq_len, eos_id=2, bos_id=1, strategy=strategy), buffer_size=5, seed=(7, shard)
    )


def test_documents_come_in_the_order_in_which_they_always_came(root):
    assert digest_of_reading(root) == READING


def test_samples_come_in_the_order_in_which_they_always_came(root):
    assert digest_of_stream(root) == STREAM


@pytest.mark.parametrize("strategy", PACKED)
def test_samples_of_whole_documents_come_in_the_order_in_which_they_always_came(root, strategy):
    assert digest_of_packing(root, strategy) == PACKED[strategy]


def test_the_files_hold_the_documents_that_name_themselves(root):
    rows = [*corpora.read(f"{root}prose/").values(), *corpora.read(f"{root}code/").values()]
    assert rows == corpora.documents([(7 * number * number) % 41 for number in range(105)])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        root = put_files(f"file://{directory}/")
        packed = {strategy: digest_of_packing(root, strategy) for strategy in PACKED}
        sys.stdout.write(f'READING = "{digest_of_reading(root)}"\nSTREAM = "{digest_of_stream(root)}"\n{packed}\n')
